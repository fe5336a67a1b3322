"""Tensor parallelism without process groups: how a model is cut, who owns what, memory, and what is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel import tp
from nanoray.parallel.axis import Axis
from nanoray.parallel.buckets import Buckets
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Shard, fill, whole_pieces, whole_shards

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


def test_a_sequence_that_ranks_do_not_divide_is_refused() -> None:
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
