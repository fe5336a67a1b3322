"""A mixture of experts in one process: against a loop over tokens, its losses, capacity, costs,
cuts, refusals.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.checkpoint.find import check_shape
from nanoray.checkpoint.run import recovers_in_place
from nanoray.config import load_config, make_config, resolve_batch
from nanoray.data.prepare import prepare
from nanoray.errors import CheckpointError, ConfigError
from nanoray.forecast.dry_run import dry_run_lines
from nanoray.forecast.memory import Sizes, model_memory
from nanoray.mesh.axis import Axis
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard, fill, whole_pieces, whole_shards
from nanoray.models.costs import (
    activation_memory,
    active_parameters,
    count_parameters,
    flops_per_token,
)
from nanoray.models.gpt import GPT, KVCache, ModelShape
from nanoray.models.moe import BALANCE, DROPPED, ENTROPY, LOAD, MoE, RouterTraining, Z
from nanoray.models.sampling import generate
from nanoray.parallel import ep, tp
from nanoray.state.state_dict import StateDict
from nanoray.trace import experts as picture
from nanoray.train.watch import routing
from tests.unit.test_activation_checkpointing import Living

SHAPE = ModelShape(
    2, 4, 20, 8, True, 65, experts=4, experts_per_token=2, expert_hidden=24, shared_experts=1
)


def moe(per_token: int = 2, capacity: float = 0.0, experts: int = 4) -> MoE:
    torch.manual_seed(0)
    layer = MoE(6, experts, per_token, 10, True, 0.0, RouterTraining(capacity=capacity))
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def by_hand(layer: MoE, x: Tensor, capacity: float = 0.0) -> tuple[Tensor, float]:
    """Each token by itself, through its experts in turn; also the share of choices that were
    dropped.
    """
    out, dropped = torch.zeros_like(x), 0
    experts, k = layer.router.weight.shape[0], layer.per_token
    for b, sequence in enumerate(x):
        taken = [0] * experts
        for t, token in enumerate(sequence):
            probabilities = (layer.router.weight @ token).softmax(0)
            chosen = probabilities.topk(k).indices.tolist()
            total = sum(probabilities[e] for e in chosen) if k > 1 else 1.0
            for e in chosen:
                taken[e] += 1
                if capacity and taken[e] > math.ceil(capacity * len(sequence) * k / experts):
                    dropped += 1
                    continue
                assert layer.up.bias is not None
                assert layer.down.bias is not None
                up, down = layer.up.bias.view(experts, -1)[e], layer.down.bias.view(experts, -1)[e]
                result = F.linear(
                    F.gelu(F.linear(token, layer.up.weight[e], up)), layer.down.weight[e], down
                )
                out[b, t] = out[b, t] + probabilities[e] / total * result
    return out, dropped / (x.shape[0] * x.shape[1] * k)


@pytest.mark.parametrize("capacity", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_it_computes_what_a_loop_over_tokens_does(per_token: int, capacity: float) -> None:
    """Values, and the gradients of everything: the router's, too, also with one expert per token."""
    layer, x = (
        moe(per_token, capacity),
        torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1)),
    )
    weight = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(2))
    expected, dropped = by_hand(layer, x, capacity)
    (expected * weight).sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    found, told = layer(x)
    torch.testing.assert_close(found, expected)
    assert told[DROPPED].item() == pytest.approx(dropped, abs=1e-6)
    assert (dropped > 0) == ((capacity in (0.5, 1.0) and per_token < 4) or capacity == 0.5)
    (found * weight).sum().backward()
    for p, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 1e-3


def test_evaluation_drops_nothing() -> None:
    layer, x = moe(2, 0.5), torch.randn(2, 8, 6)
    found, told = layer.eval()(x)
    torch.testing.assert_close(found, by_hand(layer, x)[0])
    assert told[DROPPED] == 0


def test_what_is_dropped_depends_on_no_later_token_and_on_no_other_sequence() -> None:
    layer, x = moe(1, 0.5), torch.randn(4, 8, 6)
    whole = layer(x)[0]
    changed = x.clone()
    changed[:, 5:] += 3.0
    assert torch.equal(layer(changed)[0][:, :5], whole[:, :5])
    torch.testing.assert_close(layer(x[2:3])[0], whole[2:3])


def test_experts_without_a_token_have_gradients_of_zero() -> None:
    """Not None: torch's DDP would wait for them."""
    layer = moe(1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = torch.rand(2, 5, 6) + 0.1
    found, told = layer(x)
    assert told[LOAD:].tolist() == [0, 0, 1, 0]
    found.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert layer.up.weight.grad is not None
    assert [bool(g.abs().sum()) for g in layer.up.weight.grad] == [False, False, True, False]


def test_the_losses_of_the_router() -> None:
    layer, x = moe(2), torch.randn(3, 8, 6)
    _, told = layer(x)
    logits = x @ layer.router.weight.T
    per_sequence = []
    for sequence in logits.softmax(-1):
        share = torch.zeros(4)
        for token in sequence:
            share[token.topk(2).indices] += 1 / (len(sequence) * 2)
        per_sequence.append(4 * (share * sequence.mean(0)).sum())
    torch.testing.assert_close(told[BALANCE], torch.stack(per_sequence).mean())
    torch.testing.assert_close(told[Z], logits.exp().sum(-1).log().square().mean())
    torch.testing.assert_close(told[LOAD:].sum(), torch.tensor(1.0))
    assert told[BALANCE].requires_grad
    layer.router.weight.data.zero_()
    even = layer(x)[1].detach()
    assert even[ENTROPY] == pytest.approx(1.0, abs=1e-6)
    assert even[BALANCE] == pytest.approx(1.0, abs=1e-6), "its smallest value"
    assert even[Z] == pytest.approx(math.log(4) ** 2, abs=1e-5)


def test_the_router_computes_in_float32() -> None:
    layer, x = moe(2), torch.randn(2, 8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(x)[1]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low[[BALANCE, Z]], layer(x)[1][[BALANCE, Z]])


def gpt(
    how: str = "none",
    training: RouterTraining = RouterTraining(),  # noqa: B008
    shape: ModelShape = SHAPE,
) -> GPT:
    torch.manual_seed(0)
    return GPT(shape, 0.0, how, training)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 65, (3, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: GPT, scale: float = 1.0) -> list[Tensor]:
    loss = model(*batch())
    (loss * scale).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_loss_is_the_cross_entropy_and_its_gradient_is_that_of_all_losses() -> None:
    """Training and evaluation give the same value; the factor on a loss is also on the router's
    losses.
    """
    model = gpt(training=RouterTraining(0.0, 0.5, 0.1))
    found = gradients(model, 3.0)
    assert torch.equal(model.eval()(*batch()), found[0])
    model.train().zero_grad()
    told: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: told.append(output[1]))
    loss = model.eval()(*batch()) + sum(0.5 * layer[BALANCE] + 0.1 * layer[Z] for layer in told)
    (3.0 * loss).backward()
    for p, gradient in zip(model.parameters(), found[1:], strict=True):
        torch.testing.assert_close(p.grad, gradient)
    plain = gradients(gpt(training=RouterTraining(0.0, 0.0, 0.0)), 3.0)[1:]
    for (name, _), without, gradient in zip(
        model.named_parameters(), plain, found[1:], strict=True
    ):
        if "router" in name:
            assert not torch.allclose(without, gradient, rtol=1e-2)


@pytest.mark.parametrize("how", ["selective", "block"])
def test_activation_checkpointing_changes_no_bit(how: str) -> None:
    for a, b in zip(gradients(gpt(how)), gradients(gpt()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    """Traced and differentiated by the compiler; its C++ (torch 2.13) is not made where a path has
    a space.
    """
    model = gpt()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for a, b in zip(gradients(model), gradients(gpt()), strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_sampling_with_cached_keys_reads_as_without() -> None:
    model = gpt().eval()
    idx, cache = batch()[0], [KVCache(8) for _ in range(2)]
    step_by_step = [model(idx[:, t : t + 1], kv_cache=cache) for t in range(8)]
    for t in range(8):
        torch.testing.assert_close(step_by_step[t], model(idx[:, : t + 1]))
    assert generate(model, idx[:, :2], 12).shape == (3, 14)


def test_a_dense_model_is_as_it_was() -> None:
    assert "experts" not in ModelShape(2, 4, 20, 8, True, 65).to_dict()
    assert ModelShape(**SHAPE.to_dict()) == SHAPE  # type: ignore[arg-type]
    assert not [
        name
        for name, _ in GPT(ModelShape(2, 4, 20, 8, True, 65)).named_parameters()
        if "router" in name
    ]


def test_a_checkpoint_of_another_mixture_is_refused() -> None:
    def state(shape: ModelShape) -> StateDict:
        return StateDict(
            {}, {}, meta={"model_shape": shape.to_dict(), "config": {"experts": shape.experts}}
        )

    dense = ModelShape(2, 4, 20, 8, True, 65)
    check_shape(state(SHAPE), SHAPE.to_dict())
    check_shape(state(dense), dense.to_dict())
    with pytest.raises(CheckpointError, match="experts is 4 there and 0 here"):
        check_shape(state(SHAPE), dense.to_dict())
    with pytest.raises(CheckpointError, match="experts is 0 there and 4 here"):
        check_shape(state(dense), SHAPE.to_dict())


# Costs.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_the_number_of_parameters_is_what_torch_counts(bias: bool, shared: int) -> None:
    shape = ModelShape(2, 4, 20, 8, bias, 65, 4, 2, 24, shared)
    model = gpt(shape=shape)
    assert count_parameters(shape) == sum(p.numel() for p in model.parameters())
    one = sum(
        p.numel() // 4
        for name, p in model.named_parameters()
        if ".mlp.up." in name or ".mlp.down." in name
    )
    assert active_parameters(shape) == count_parameters(shape) - 2 * one
    assert flops_per_token(shape) == 6 * (active_parameters(shape) - 8 * 20) + 12 * 2 * 20 * 8


@pytest.mark.parametrize("how", ["none", "selective", "block"])
@pytest.mark.parametrize("mixture", [(4, 2, 128, 0), (8, 1, 64, 0), (4, 2, 128, 1)])
def test_memory_is_what_the_formula_says(how: str, mixture: tuple[int, int, int, int]) -> None:
    shape = ModelShape(4, 4, 64, 32, False, 128, *mixture)
    model = gpt(how, shape=shape)
    tokens = torch.randint(0, 128, (16, 32))
    with Living(model) as living:
        loss = model(tokens, tokens)
        kept = living.now
        loss.backward()
    estimate = activation_memory(shape, 16, "fp32", how)
    deeper = activation_memory(ModelShape(5, 4, 64, 32, False, 128, *mixture), 16, "fp32", how)
    layers = 4 * (deeper["activations"] - estimate["activations"])
    outside = 16 * 32 * (8 * 64 + 24) + estimate["logits"] / 2
    assert kept == pytest.approx(layers + outside, rel=0.01)
    assert living.peak == pytest.approx(estimate["activations"] + 2 * estimate["logits"], rel=0.35)


# Cuts.

MESHES = [(2, 2), (2, 4), (4, 4), (2, 6)]  # ep, dp


def cut(rank: int, split: int, dp: int) -> tuple[GPT, Axis, Axis]:
    """One rank's model, and its axes dp and edp; nothing may be sent."""
    model = gpt()
    mesh, layout = (
        Mesh(rank, dp, rank, torch.device("cpu"), "none", "test"),
        Layout(dp=dp, ep=split),
    )
    groups = {
        axis: next(g for g in layout.groups(axis) if rank in g) for axis in ("dp", "ep", "edp")
    }
    axes = {
        axis: Axis(axis, group, group.index(rank), None, mesh) for axis, group in groups.items()
    }
    ep.cut(model, axes["ep"])
    return model, axes["dp"], axes["edp"]


def owned(rank: int, split: int, dp: int, mode: str) -> list[Shard]:
    model, data, replicas = cut(rank, split, dp)
    parallel = ep.ExpertParallel(model, data, replicas, mode, 0.001)
    own, tensor = (
        whole_shards(model) if parallel.shards is None else parallel.shards,
        Axis("tp", (0,), 0, None, data.mesh),
    )
    return tp.with_owners(
        own, tp.names_of_cut(model), tensor, parallel.replicas, mode != "ddp_by_hand"
    )


def test_which_ranks_share_experts() -> None:
    layout = Layout(dp=4, ep=2)
    assert layout.groups("ep") == [(0, 1), (2, 3)]
    assert layout.groups("edp") == [(0, 2), (1, 3)]
    assert str(layout) == "dp 4 (ep 2)"


def test_a_rank_has_its_experts() -> None:
    whole, (model, _, _) = gpt(), cut(3, 2, 4)
    mine, all_of_them = model.blocks[1].mlp, whole.blocks[1].mlp
    assert torch.equal(mine.up.weight, all_of_them.up.weight[2:])
    assert torch.equal(mine.down.bias, all_of_them.down.bias.view(4, 20)[2:].flatten())
    assert torch.equal(mine.router.weight, all_of_them.router.weight), (
        "every rank rates all experts"
    )
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in whole.named_parameters()
    ]


@pytest.mark.parametrize("mode", ["ddp_by_hand", "zero1", "zero2"])
@pytest.mark.parametrize(("split", "dp"), MESHES)
def test_each_element_has_one_owner_and_is_put_together_again(
    split: int, dp: int, mode: str
) -> None:
    whole = {name: p.detach() for name, p in gpt().named_parameters()}
    saved: dict[str, list[Any]] = {name: [] for name in whole}
    for rank in range(dp):
        for shard in owned(rank, split, dp, mode):
            if shard.owner:
                saved[shard.piece.name].append((shard.piece, shard.param.detach().reshape(-1)))
    for name, piece in whole_pieces(gpt()).items():
        assert sum(other.numel for other, _ in saved[name]) == piece.numel, name
        assert torch.equal(fill(piece, saved[name]).view(piece.shape), whole[name]), name


def test_holders_are_the_ranks_with_the_same_piece() -> None:
    for mode in ("ddp_by_hand", "zero1"):
        every = [shard for rank in range(4) for shard in owned(rank, 2, 4, mode)]
        places = [shard.piece.place for shard in every]
        assert all(shard.holders == places.count(shard.piece.place) for shard in every), mode


def test_memory_and_dry_run(text: Path, tmp_path: Path) -> None:
    small = {
        "experts": 4,
        "expert_hidden": 64,
        "n_embd": 32,
        "n_layer": 2,
        "precision": "fp32",
        "device": "cpu",
    }
    values = small | {
        "micro_batch_size": 2,
        "dataset": str(text),
        "data_dir": str(tmp_path),
        "bucket_mb": 0.001,
    }
    config = make_config(values | {"ep": 2, "dp_mode": "zero1"})
    dataset = prepare(config)
    model = GPT(ModelShape.of(config, dataset.vocab_size))
    experts = sum(
        p.numel() for name, p in model.named_parameters() if name in ep.names_of_experts(model)
    )
    rest = Sizes.of(model).params - experts
    ep.cut(model, Axis("ep", (0, 1), 0, None, Mesh(0, 2, 0, torch.device("cpu"), "none", "test")))
    found = model_memory(config, model, 4, 1, 0.001)
    assert found["parameters"] == 4 * (rest + experts // 2)
    assert found["optimizer"] == pytest.approx(8 * (rest / 4 + experts / 2 / 2), abs=16)
    mirror = {n: model_memory(config, model, n, 1, 0.001, mirrored=True)["mirror"] for n in (4, 2)}
    assert mirror[4] == pytest.approx(12 * (rest / 4 + experts / 2 / 2), abs=24)
    assert mirror[2] == pytest.approx(12 * rest / 2 + 16 * experts / 2, abs=24), (
        "the weights of the other experts, too"
    )
    lines = dry_run_lines(config, [], resolve_batch(config, 4), dataset, "here")
    assert lines[0] == "mesh       4 rank(s) = dp 4 (ep 2)"
    total, active = (
        f(ModelShape.of(config, dataset.vocab_size)) for f in (count_parameters, active_parameters)
    )
    (model,) = [line for line in lines if line.startswith("model ")]
    assert f" {total:,} parameters, {active:,} active: 2 of 4 experts a token, " in model
    assert f"parameters {4 * (rest + experts // 2) / 2**20:.1f}" in "".join(lines)


def test_what_cannot_be_is_refused() -> None:
    def refused(match: str, **values: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            make_config({"micro_batch_size": 1, **values})

    by_hand = {"dp_mode": "zero1"}
    refused(r"ep = 2 would be ignored: experts = 0", ep=2)
    refused(r"z_loss = 0.5 would be ignored: experts = 0", z_loss=0.5)
    refused(r"experts_per_token = 5 is above experts = 4", experts=4, experts_per_token=5)
    refused(r"ep = 3 does not divide experts = 4; use an ep of 1, 2, 4", experts=4, ep=3, **by_hand)
    refused(
        r"ep = 2 with dp_mode = ddp: .* use dp_mode ddp_by_hand, zero1 or zero2",
        experts=4,
        ep=2,
    )
    refused(r"ep = 2 with dp_mode = fsdp", experts=4, ep=2, dp_mode="fsdp")
    refused(
        r"tp = 4 must divide n_head = 4, .*, but it does not divide expert_hidden = 6; use a tp of "
        r"1, 2",
        **{"experts": 4, "tp": 4, "n_head": 4, "n_embd": 64, "expert_hidden": 6},
    )
    refused(r"dp_mode = fsdp with pp = 2", experts=4, pp=2, dp_mode="fsdp", n_layer=4)
    refused(
        r"scaling = nanochat with experts = 4: its rules are for models without experts",
        experts=4,
        scaling="nanochat",
    )
    refused(r"experts = 4 would be ignored: model = resnet", experts=4, model="resnet")
    config = make_config({"micro_batch_size": 1, "experts": 4, "ep": 2, **by_hand})
    with pytest.raises(
        ConfigError, match=r"ep = 2 does not divide dp = 3; choose a divisor of dp for ep"
    ):
        Layout.of(config, 3)
    config = make_config(
        {"micro_batch_size": 1, "experts": 4, "ep": 2, "tp": 2, "pp": 2, "n_layer": 4, **by_hand}
    )
    with pytest.raises(
        ConfigError,
        match=r"ep = 2 does not divide dp = 3 of dp\*tp\*pp = 3\*2\*2 = 12 ranks; choose",
    ):
        Layout.of(config, 12)
    with pytest.raises(
        ConfigError, match=r"ranks = dp\*tp\*pp, but tp\*pp = 2\*2 = 4 does not divide 6 rank"
    ):
        Layout.of(config, 6)
    axis = Axis("ep", (0, 1, 2), 0, None, Mesh(0, 3, 0, torch.device("cpu"), "none", "test"))
    with pytest.raises(ConfigError, match="ep = 3 does not divide experts = 4"):
        ep.cut(gpt(), axis)
    with pytest.raises(ConfigError, match="ep = 3 cuts experts, but the model has none"):
        ep.cut(nn.Linear(2, 2), axis)
    assert not recovers_in_place(config, "gloo", 4), "a lost rank's experts may be nowhere else"


def test_the_preset_takes_the_flops_of_the_dense_one() -> None:
    shape, dense = (
        ModelShape.of(load_config(preset=name), 65) for name in ("moe-tiny", "shakespeare-cpu")
    )
    assert flops_per_token(shape) == pytest.approx(flops_per_token(dense), rel=0.01)


# Metrics and the picture.


def test_metrics_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, mesh = gpt(), Mesh(0, 1, 0, torch.device("cpu"), "none", "test")
    routing.begin(model)
    assert routing.means(model, mesh) is None
    model(*batch())
    once = routing.measured(routing.means(model, mesh))
    model(*batch())
    model.eval()(*batch())
    record = routing.measured(routing.means(model, mesh))
    for key in once.keys() - {routing.LOADS}:
        assert record[key] == pytest.approx(once[key]), "a mean over passes, of those that train"
    assert record[routing.LOADS] == once[routing.LOADS]
    assert [len(layer) for layer in record["expert_load"]] == [4, 4]
    assert all(sum(layer) == pytest.approx(4, abs=1e-3) for layer in record["expert_load"])
    assert record["moe/load_max"] == max(map(max, record["expert_load"]))
    assert routing.measured(None) == {}
    assert routing.means(nn.Linear(1, 1), mesh) is None
    assert picture.main([str(tmp_path)]) == 2
    assert "has no record of experts" in capsys.readouterr().err
    lines = [json.dumps({"step": step, **record}) for step in (1, 10, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 30, "tor']))
    assert picture.main([str(tmp_path), "--figure", str(tmp_path / "metrics.jsonl" / "x.svg")]) == 2
    assert "x.svg (Not a directory); give another --figure" in capsys.readouterr().err
    assert picture.main([str(tmp_path), "--figure", str(tmp_path / "e.png")]) == 0
    assert (tmp_path / "e.png").read_bytes()[:4] == b"\x89PNG"
    assert "at step 20 the largest load is" in capsys.readouterr().out
    assert picture.LOADS == routing.LOADS
