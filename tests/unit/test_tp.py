"""Tensor parallelism without process groups: how a model is cut, who owns what, memory, and what is
refused.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint import parts
from nanoray.checkpoint.files import Draft, load, save_shared
from nanoray.cli import Loaded
from nanoray.config import Batch, make_config, resolve_batch
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.forecast.dry_run import dry_run_lines
from nanoray.forecast.memory import Sizes
from nanoray.mesh.axis import Axis
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard, fill, whole_pieces, whole_shards
from nanoray.models.costs import Cut, activation_memory, count_parameters
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import LossScaler
from nanoray.parallel import tp
from nanoray.parallel.buckets import Buckets
from nanoray.start.plan import plan
from nanoray.state.rank_state import Holding, Share
from nanoray.state.state_dict import missing_from
from nanoray.state.train_state import TrainState
from nanoray.train.guard.guards import Guards

SHAPE = ModelShape(n_layer=2, n_head=4, n_embd=24, block_size=8, bias=True, vocab_size=65)
MESHES = [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 3)]  # tp, dp


def axes(rank: int, split: int, dp: int) -> tuple[Axis, Axis]:
    """The tensor and the data axis of one rank; nothing may be sent."""
    mesh = Mesh(rank, split * dp, rank, torch.device("cpu"), "none", "test")
    layout, place = Layout(dp=dp, tp=split), Layout(dp=dp, tp=split).coords(rank)
    mine = {axis: next(g for g in layout.groups(axis) if rank in g) for axis in ("tp", "dp")}
    return Axis("tp", mine["tp"], place.tp, None, mesh), Axis(
        "dp", mine["dp"], place.dp, None, mesh
    )


def cut(rank: int, split: int, dp: int, shape: ModelShape = SHAPE) -> tuple[GPT, Axis, Axis]:
    torch.manual_seed(1)
    model = GPT(shape)
    tensor, data = axes(rank, split, dp)
    if split > 1:
        tp.cut(model, tensor)
    return model, tensor, data


def owned(rank: int, split: int, dp: int, mode: str) -> list[Shard]:
    model, tensor, data = cut(rank, split, dp)
    if mode == "ddp":
        return tp.with_owners(
            whole_shards(model), tp.names_of_cut(model), tensor, lambda name: data, False
        )
    shards = Buckets(model, data, mode, 0.001).shards
    assert shards is not None
    return tp.with_owners(shards, tp.names_of_cut(model), tensor, lambda name: data, True)


def test_a_rank_has_its_heads_of_queries_keys_and_values() -> None:
    torch.manual_seed(1)
    whole = GPT(SHAPE)
    model, _, _ = cut(3, 4, 1)  # the last one of four heads, each of 6
    full = whole.blocks[1].attn.qkv.weight.view(3, 4, 6, 24)
    mine = model.blocks[1].attn.qkv.weight
    assert torch.equal(mine, full[:, 3].reshape(18, 24))
    assert torch.equal(model.blocks[1].mlp.down.weight, whole.blocks[1].mlp.down.weight[:, 72:])
    assert model.blocks[1].attn.proj.bias.shape == (24,), "added once, after the sum"
    assert model.blocks[1].mlp.up.bias.shape == (24,)
    assert model.lm_head.weight is model.tok_emb.weight
    assert torch.equal(model.tok_emb.weight, whole.tok_emb.weight[96:])
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in whole.named_parameters()
    ]


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize(("split", "dp"), MESHES)
def test_each_element_has_one_owner_and_is_put_together_again(
    split: int, dp: int, mode: str
) -> None:
    """`fill` finds each element exactly once among the owners' pieces, and nothing of it changes."""
    torch.manual_seed(1)
    whole = {name: p.detach() for name, p in GPT(SHAPE).named_parameters()}
    saved: dict[str, list[Any]] = {name: [] for name in whole}
    for rank in range(split * dp):
        for shard in owned(rank, split, dp, mode):
            if shard.owner:
                saved[shard.piece.name].append((shard.piece, shard.param.detach().reshape(-1)))
    for name, piece in whole_pieces(GPT(SHAPE)).items():
        assert sum(other.numel for other, _ in saved[name]) == piece.numel, name
        assert torch.equal(fill(piece, saved[name]).view(piece.shape), whole[name]), name


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.permutations([(1, 3), (2, 1), (2, 2), (4, 1)], 2)]
)
def test_any_mesh_fills_its_pieces_from_those_of_any_other(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    saved: dict[str, list[Any]] = {}
    for rank in range(before[0] * before[1]):
        for shard in owned(rank, *before, "zero1"):
            if shard.owner:
                saved.setdefault(shard.piece.name, []).append(
                    (shard.piece, shard.param.detach().clone())
                )
    for rank in range(after[0] * after[1]):
        for shard in owned(rank, *after, "zero1"):
            assert torch.equal(fill(shard.piece, saved[shard.piece.name]), shard.param), (
                shard.piece.place
            )


def test_holders_are_the_ranks_with_the_same_piece() -> None:
    for mode in ("ddp", "zero1"):
        every = [shard for rank in range(4) for shard in owned(rank, 2, 2, mode)]
        places = [shard.piece.place for shard in every]
        assert all(shard.holders == places.count(shard.piece.place) for shard in every), mode


def test_the_number_of_parameters_is_that_of_the_page() -> None:
    for shape in (SHAPE, ModelShape(3, 8, 64, 16, False, 200)):
        L, C, T, V, b = (
            shape.n_layer,
            shape.n_embd,
            shape.block_size,
            shape.padded_vocab,
            shape.bias,
        )
        for split in (1, 2, 4):
            model, _, _ = cut(0, split, 1, shape)
            formula = (
                ((12 * C * C + 7 * C * b) * L + V * C) // split
                + T * C
                + (2 + 4 * b) * C * L
                + (1 + b) * C
            )
            assert Sizes.of(model).params == formula
        assert (
            count_parameters(shape)
            == ((12 * C * C + 7 * C * b) * L + V * C) + T * C + (2 + 4 * b) * C * L + (1 + b) * C
        )


@pytest.mark.parametrize("kept", ["none", "selective", "block"])
def test_activations_of_a_rank(kept: str) -> None:
    shape = ModelShape(4, 4, 64, 32, False, 128)
    one, two = (activation_memory(shape, 8, "fp32", kept, Cut(split)) for split in (1, 2))
    assert two["logits"] == one["logits"] // 2
    tokens, C, L, H = 8 * 32, 64, 4, 4
    less = {
        "none": L * (24 * C + 2 * H),
        "selective": L * (16 * C + 2 * H) + 8 * C,
        "block": 24 * C + 2 * H,
    }[kept]
    assert one["activations"] - two["activations"] == tokens * less
    cut_twice = activation_memory(shape, 8, "fp32", kept, Cut(2, sequence=True))
    # Half of a norm's input, mean and deviation; of a block's input
    norm, stream = 2 * C + 4, 2 * C
    less = {
        "none": (2 * L + 1) * norm,
        "selective": L * stream + norm + 4 + norm,
        "block": L * stream + norm + 4 + norm,
    }
    assert two["activations"] - cut_twice["activations"] == tokens * less[kept]
    assert cut_twice["logits"] == two["logits"]


def test_dry_run_tells_memory_and_who_talks_to_whom(text: Path, tmp_path: Path) -> None:
    values = {"dataset": str(text), "data_dir": str(tmp_path), "device": "cpu", "precision": "fp32"}
    config = make_config({"micro_batch_size": 4, "tp": 2, "dp_mode": "zero1", **values})
    loaded = Loaded(config, frozenset(), True)
    dataset = prepare(config)
    planned = plan(loaded, 4, dataset)
    lines = dry_run_lines(planned.config, planned.notes, resolve_batch(config, 2), dataset, "here")
    assert lines[0] == "mesh       4 rank(s) = dp 2 × tp 2"
    (memory,) = [line for line in lines if line.startswith("memory")]
    model, _, _ = cut(0, 2, 1, ModelShape.of(config, dataset.vocab_size))
    assert f"parameters {4 * Sizes.of(model).params / 2**20:.1f}" in memory


def test_what_cannot_be_cut_is_refused(text: Path, tmp_path: Path) -> None:
    def refused(match: str, **values: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            make_config({"micro_batch_size": 1, "tp": 3, **values})

    refused(
        r"tp = 3 must divide n_head = 4, 4\*n_embd = 4\*128 = 512, but it does not divide n_head = "
        r"4 and 4\*n_embd"
    )
    refused(r"tp = 3 with model = resnet: .* drop tp", model="resnet", val_fraction=0.1)
    refused(r"tp = 3 with model = own: .* drop tp", model="own")
    refused(
        r"allreduce = ring with tp = 3: it sums over all ranks",
        allreduce="ring",
        n_head=3,
        n_embd=96,
    )
    config = make_config(
        {"micro_batch_size": 1, "tp": 3, "n_head": 3, "n_embd": 96, "dataset": str(text)}
    )
    config = config.model_copy(update={"data_dir": str(tmp_path)})
    with pytest.raises(
        ConfigError,
        match=r"the padded vocabulary = \d+, but it does not divide the padded vocabulary",
    ):
        plan(Loaded(config, frozenset(), False), 3, prepare(config))
    for ranks in (1, 2, 4):
        with pytest.raises(
            ConfigError, match=rf"ranks = dp\*tp, but tp = 3 does not divide {ranks} rank"
        ):
            Layout.of(config, ranks)
    with pytest.raises(ConfigError, match=r"tp = 2 cuts a gpt, but the model is a Linear"):
        tp.cut(nn.Linear(2, 2), axes(0, 2, 1)[0])


def test_what_cannot_be_cut_along_the_sequence_is_refused() -> None:
    def refused(match: str, **values: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            make_config({"micro_batch_size": 1, "sequence_parallel": True, **values})

    refused(r"sequence_parallel = True would be ignored: tp = 1 shares no sequences; use tp 2, or")
    refused(
        r"sequence_parallel cuts sequences over tp = 4 ranks, which does not divide block_size = "
        r"30; use block_size 32",
        **{"tp": 4, "block_size": 30},
    )
    model, axis, _ = cut(0, 2, 1)
    again = GPT(SHAPE)
    tp.cut(again, axis, sequence=True)
    with pytest.raises(
        ConfigError,
        match="over tp = 2 ranks, which does not divide 7 positions; use sequences of 8",
    ):
        again(torch.zeros(2, 7, dtype=torch.int64))
    assert tp.names_of_partial(model) == set()
    assert tp.names_of_partial(again) == {
        name for name, _ in model.named_parameters()
    } - tp.names_of_cut(model)


def test_the_loss_by_parts_is_cross_entropy() -> None:
    """Of one rank with all tokens: value and gradient, also where a logit is -inf."""
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    logits[:, 60:] = -torch.inf
    targets = torch.tensor([0, 59, 3, 3, 17, 41])
    (axis, _), found = axes(0, 1, 1), []
    for loss in (
        lambda x: tp._CrossEntropy.apply(x, targets, axis),
        lambda x: nn.functional.cross_entropy(x, targets),
    ):
        leaf = logits.clone().requires_grad_()
        value: Tensor = loss(leaf)
        (2 * value).backward()
        found.append((value.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1])


def test_a_rank_saves_and_loads_its_pieces_and_no_whole_weights(tmp_path: Path) -> None:
    """What a checkpoint has for a rank of tp are flat pieces, not tensors of its model."""
    states = []
    for rank in range(2):
        model, _, _ = cut(rank, 2, 1)
        shards = owned(rank, 2, 1, "ddp")
        for shard, own in zip(shards, whole_shards(model), strict=True):
            shard.param = own.param
        optimizer = torch.optim.SGD([shard.param for shard in shards], lr=0.1)
        config = make_config({"micro_batch_size": 2})
        scaler = LossScaler(torch.device("cpu"), False)
        guards = Guards(config, Batch(2, 1, 1), torch.device("cpu"), None)
        torch.manual_seed(1)
        state = TrainState(GPT(SHAPE), optimizer, scaler, guards)
        state.model = model
        state.hold(Share(Holding(shards, optimizer), weights=shards))
        states.append(state)
        assert state.pack().model == {}

    draft = Draft(tmp_path, 0, "0", None)
    draft.begin(1000)
    parts.write(draft.temp, 1, states[1].pack_own(first=False))
    first = states[0].pack_own(first=True)
    save_shared(draft, first, 2, 1, lambda: None)
    assert missing_from(load(draft.final)) == []

    for state in states:
        before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        saved = load(draft.final, state.pieces, state.weight_pieces)
        with torch.no_grad():
            for p in state.model.parameters():
                p.zero_()
        saved.has_optimizer = False
        state.load(saved)
        for name, p in state.model.named_parameters():
            assert torch.equal(p, before[name]), name
