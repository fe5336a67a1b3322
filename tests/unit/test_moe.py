"""A mixture of experts in one process: against a loop over tokens, its losses, costs,
cuts, refusals.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.checkpoint.resume import check_shape
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.config.layout import Layout
from nanoray.errors import CheckpointError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.moe import BALANCE, ENTROPY, LOAD, MoE, RouterTraining, Z
from nanoray.observe.watch.routing import LOADS, RoutingMeans
from nanoray.parallel import ep, tp
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import Shard, fill, whole_pieces, whole_shards

SHAPE = ModelShape(
    2, 4, 20, 8, True, 65, experts=4, experts_per_token=2, expert_hidden=24, shared_experts=1
)


def moe(per_token: int = 2, experts: int = 4) -> MoE:
    torch.manual_seed(0)
    layer = MoE(6, experts, per_token, 10, True, 0.0)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def by_hand(layer: MoE, x: Tensor) -> Tensor:
    """Each token by itself, through its experts in turn."""
    out = torch.zeros_like(x)
    experts, k = layer.router.weight.shape[0], layer.per_token
    for b, sequence in enumerate(x):
        for t, token in enumerate(sequence):
            probabilities = (layer.router.weight @ token).softmax(0)
            chosen = probabilities.topk(k).indices.tolist()
            total = sum(probabilities[e] for e in chosen) if k > 1 else 1.0
            for e in chosen:
                assert layer.up.bias is not None
                assert layer.down.bias is not None
                up, down = layer.up.bias.view(experts, -1)[e], layer.down.bias.view(experts, -1)[e]
                result = F.linear(
                    F.gelu(F.linear(token, layer.up.weight[e], up)), layer.down.weight[e], down
                )
                out[b, t] = out[b, t] + probabilities[e] / total * result
    return out


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_it_computes_what_a_loop_over_tokens_does(per_token: int) -> None:
    """Values, and the gradients of everything: the router's, too, also with one expert per token."""
    layer = moe(per_token)
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(2))
    expected = by_hand(layer, x)
    (expected * weight).sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    found, _ = layer(x)
    torch.testing.assert_close(found, expected)
    (found * weight).sum().backward()
    for p, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 1e-3


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
    model = gpt(training=RouterTraining(0.5, 0.1))
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
    plain = gradients(gpt(training=RouterTraining(0.0, 0.0)), 3.0)[1:]
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


# Metrics.


def test_metrics() -> None:
    model, mesh = gpt(), Mesh(0, 1, 0, torch.device("cpu"), "none", "test")
    means = RoutingMeans(model.routing, mesh)
    means.begin_step(1)
    means.phase(1, "data")
    means.gradients_ready(1, logged=True)
    assert means.measured() == {}, "nothing was routed yet"
    model(*batch())
    means.gradients_ready(1, logged=True)
    once = means.measured()
    model(*batch())
    model.eval()(*batch())
    means.gradients_ready(1, logged=True)
    record = means.measured()
    for key in once.keys() - {LOADS}:
        assert record[key] == pytest.approx(once[key]), "a mean over passes, of those that train"
    assert record[LOADS] == once[LOADS]
    assert [len(layer) for layer in record["expert_load"]] == [4, 4]
    assert all(sum(layer) == pytest.approx(4, abs=1e-3) for layer in record["expert_load"])
    assert record["moe/load_max"] == max(map(max, record["expert_load"]))
    means.begin_step(2)
    means.gradients_ready(2, logged=False)
    assert means.measured() == {}, "a step that is not logged costs nothing"
