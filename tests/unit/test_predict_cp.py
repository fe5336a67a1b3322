"""What context parallelism costs, by formulas: numbers worked by hand, and rules that must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoray.cli.forecast.job import AssumedDevice, Job
from nanoray.cli.forecast.links import Link, Topology
from nanoray.cli.forecast.owners import holders_of, rank_model
from nanoray.cli.forecast.parallelisms.record import Talk
from nanoray.cli.forecast.predict import OnTopology, Speed, predict
from nanoray.cli.forecast.rank_memory import rank_memory
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config import Batch, make_config
from nanoray.config.layout import Layout
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.kernels import Kernels
from nanoray.models.moe import RouterTraining
from nanoray.models.precision import weight_type
from nanoray.parallel import cp as context
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh

# 256 rows with padding
SHAPE = ModelShape(n_layer=4, n_head=8, n_embd=64, block_size=16, bias=True, vocab_size=250)
NODES = Topology(
    ranks_per_node=4,
    intra=Link(alpha_us=0, bandwidth_gb_per_s=1),
    inter=Link(alpha_us=0, bandwidth_gb_per_s=1),
    peak_tflops=100,
)
MODES = ["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"]


def job(sequences: int = 64, precision: str = "fp32", tokens: int = 16, **settings: Any) -> Job:
    config = make_config({"micro_batch_size": 1, "block_size": tokens, **settings})
    return Job(replace(SHAPE, block_size=tokens), config, sequences, precision, 0.05)


def rank_memory_of(some: Job, layout: Layout, micro: int, stage: int) -> dict[str, int]:
    batch = Batch(micro, some.sequences // (layout.dp * micro), layout.dp)
    device = AssumedDevice("cpu", some.precision, some.bucket_mb, mirrored=False)
    return rank_memory(some.config_at(layout), some.shape, layout, batch, device, stage)


def by_what(talks: list[Talk], axis: str) -> dict[str, Talk]:
    return {talk.what: talk for talk in talks if talk.axis == axis}


# What travels


def test_tensor_ranks_have_some_of_the_heads_and_stages_some_of_the_layers() -> None:
    whole = by_what(talks_of(job(4), Layout(cp=4), 2, 0), "cp")["keys and values"]
    halved = by_what(talks_of(job(4), Layout(cp=4, tp=2), 2, 0), "cp")["keys and values"]
    assert halved.nbytes == whole.nbytes / 2
    assert halved.times == whole.times
    stage = by_what(talks_of(job(4), Layout(cp=4, pp=2), 2, 1), "cp")["keys and values"]
    assert stage.times == whole.times / 2


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_summed_over_parts_of_sequences_as_over_replicas(mode: str) -> None:
    some = job(64, dp_mode=mode)
    cut = talks_of(some, Layout(dp=2, cp=4), 1, 0)
    whole = talks_of(some, Layout(dp=8), 1, 0)
    (axis,) = {talk.axis for talk in cut if talk.axis.startswith("dp")}
    assert axis == "dp_cp"
    once = [talk.sent(8) for talk in cut if talk.axis == axis and talk.when == "beside"]
    assert sum(once) == pytest.approx(
        sum(talk.sent(8) for talk in whole if talk.when == "beside") * (4 if mode == "zero2" else 1)
    ), "zero2 sends after each of four times as many micro batches"


def test_what_else_travels_is_of_own_tokens() -> None:
    """The stream between stages, and what tensor ranks sum."""
    for layout in (Layout(tp=2), Layout(pp=2)):
        whole = [talk for talk in talks_of(job(4), layout, 2, 1 % layout.pp) if talk.when != "once"]
        own = talks_of(job(4), replace(layout, cp=2), 2, 1 % layout.pp)
        axis = "tp" if layout.tp > 1 else "pp"
        own = [talk for talk in own if talk.axis == axis and talk.when != "once"]
        for mine, theirs in zip(own, (t for t in whole if t.axis == axis), strict=True):
            assert mine.times == theirs.times
            assert mine.nbytes == theirs.nbytes / 2


# Memory


@settings(max_examples=40)
@given(
    st.sampled_from([Layout(), Layout(dp=2), Layout(tp=2), Layout(dp=2, pp=2), Layout(tp=2, pp=2)]),
    st.sampled_from(MODES),
    st.sampled_from(["none", "selective", "block"]),
    st.sampled_from(["fp32", "bf16"]),
)
def test_cp_divides_what_a_rank_keeps_of_sequences_and_no_weights(
    layout: Layout, mode: str, checkpointing: str, precision: str
) -> None:
    some = job(64, precision, dp_mode=mode, activation_checkpointing=checkpointing)
    for stage in range(layout.pp):
        whole = rank_memory_of(some, layout, 2, stage)
        cut = rank_memory_of(some, replace(layout, cp=4), 2, stage)
        assert cut["activations"] == whole["activations"] / 4
        assert cut["logits"] == whole["logits"] / 4
        assert cut["copies"] == whole["copies"]
        # Weights are replicated over cp, and the sharded modes shard over dp·cp ranks.
        replicas = rank_memory_of(some, replace(layout, dp=4 * layout.dp), 2, stage)
        for part in ("parameters", "gradients", "optimizer"):
            assert cut[part] == replicas[part]


@pytest.mark.parametrize("mode", MODES)
def test_holders_are_those_of_as_many_data_replicas(mode: str) -> None:
    def held(layout: Layout) -> list[Any]:
        config = make_config(
            {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": 16, "micro_batch_size": 1}
            | {"dp_mode": mode, "cp": layout.cp}
        )
        dtype = weight_type(config.precision)
        holders = holders_of(
            config, layout, 0.01, lambda place: rank_model(config, 65, dtype, place)
        )
        return [(holder.held, holder.updated) for holder in holders]

    assert held(Layout(dp=2, cp=2)) == held(Layout(dp=4))


# Seconds


def test_attention_hides_what_goes_round_the_ring_where_sequences_are_long() -> None:
    """Bytes grow with the tokens of a rank, the attention beside them with their square."""
    speed = Speed(1e12, 1e12)

    def exposed(tokens: int, cp: int) -> float:
        some = job(1, tokens=tokens, precision="bf16")
        return predict(some, Layout(cp=cp), 1, OnTopology(NODES), speed).parts["cp"]

    # Of 2·B·(T/cp)·C numbers at 1 GB/s; 2·(T/cp)²·C FLOPs at 1 TFLOP/s hide them: in forward from
    # T/cp = 2,000 tokens on, in backward (2 + 4 bytes a number, 4·(T/cp)²·C FLOPs) from 3,000 on.
    for cp in (2, 4):
        passes = 4 * (cp - 1)
        for own in (256, 1024, 4096):
            pass_s = 2 * own * 64 * 2e-9
            attention_s = 2 * own**2 * 64 / 1e12
            expected = passes * max(0.0, pass_s - attention_s)
            expected += passes * max(0.0, 3 * pass_s - 2 * attention_s)
            expected += 4 * 2 * pass_s  # the gradients' way home, after the last block
            assert exposed(own * cp, cp) == pytest.approx(expected, rel=1e-6)


def test_a_rank_computes_its_part_of_a_step() -> None:
    free = Link(alpha_us=0, bandwidth_gb_per_s=1e12)
    network = OnTopology(NODES.model_copy(update={"intra": free, "inter": free}))
    speed = Speed(1e12, 1e12)
    alone = predict(job(8), Layout(), 2, network, speed)
    cut = predict(job(8), Layout(cp=4), 2, network, speed)
    assert cut.parts["compute"] == pytest.approx(alone.parts["compute"] / 4)
    assert cut.step_s == pytest.approx(alone.step_s / 4, rel=1e-6)


# Against a model that is really cut


class Counted(Axis):
    """An axis that exchanges nothing and notes what it would have: (kind, bytes)."""

    seen: list[tuple[str, int]]

    def start_pass_on(self, tensor: Tensor, distance: int, what: str) -> Any:
        self.seen.append((what, tensor.nbytes))
        received = tensor.clone()
        return lambda: received

    def start_all_gather(self, flat: Tensor, what: str, bucket: int | None = None) -> Any:
        self.seen.append((what, flat.nbytes))
        parts = flat.view(self.size, -1)
        parts.copy_(parts[self.index].clone().expand_as(parts))
        return lambda: None

    def start_reduce_scatter(
        self, flat: Tensor, what: str, bucket: int | None = None, last: bool = False
    ) -> Any:
        self.seen.append((what, flat.nbytes))
        return lambda out: out.copy_(flat.view(self.size, -1)[self.index])


class CutModel(NamedTuple):
    model: GPT
    axis: Counted
    shape: ModelShape


def cut_model(
    cp: int, way: str = "ring", kept: str = "none", kernel: str = "flash", **settings: Any
) -> CutModel:
    """A model of 2 blocks on the rank of cp that attends to most."""
    mesh = Mesh(0, cp, 0, torch.device("cpu"), "none", "test")
    axis = Counted("cp", tuple(range(cp)), cp - 1, None, mesh)
    axis.seen = []
    shape = replace(SHAPE, n_layer=2, block_size=128, **settings)
    model = GPT(shape, 0.0, kept, RouterTraining(), Kernels(kernel))
    if cp > 1:
        context.cut(model, axis, way)
    return CutModel(model, axis, shape)


@pytest.mark.parametrize("way", ["ring", "all_gather"])
@pytest.mark.parametrize("kept", ["none", "selective", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cut_model_sends_what_the_formula_says(way: str, kept: str, precision: str) -> None:
    model, axis, shape = cut_model(4, way, kept)
    x = torch.randint(250, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, x)
    loss.backward()
    some = job(2, precision, activation_checkpointing=kept, cp=4, cp_attention=way, tokens=128)
    talks = talks_of(replace(some, shape=shape), Layout(cp=4), 2, 0)
    own = [talk for talk in talks if talk.axis == "cp"]
    for kinds, is_of in (
        ("keys_values", lambda talk: talk.what.startswith("keys")),
        ("keys_values_grad", lambda talk: talk.what.startswith("their")),
    ):
        found = [size for what, size in axis.seen if what == kinds]
        said = [talk for talk in own if is_of(talk)]
        assert sum(talk.times for talk in said) == len(found), kinds
        assert sum(talk.times * talk.nbytes for talk in said) == sum(found), kinds


def kept_for_backward(cut: CutModel, sequences: int) -> int:
    """Return the bytes of the storages, other than weights, that a forward keeps."""
    cp = cut.axis.size
    weights = {p.untyped_storage().data_ptr() for p in cut.model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    x = torch.randint(250, (sequences, cut.shape.block_size // cp))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cut.model(x, x)
    return sum(kept.values())


@pytest.mark.parametrize("kernel", ["flash", "plain"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("cp", "way"), [(2, "ring"), (4, "ring"), (2, "all_gather")])
def test_a_cut_model_keeps_what_the_formula_says(
    cp: int, way: str, rotary: bool, kernel: str
) -> None:
    """And the ring keeps what a model that is not cut keeps of as many tokens with flash."""
    found = kept_for_backward(cut_model(cp, way, kernel=kernel, rotary=rotary), 8)
    shape = cut_model(1, rotary=rotary).shape
    cut = Cut(cp=cp, gathers=way == "all_gather")
    parts = activation_memory(shape, 8, "fp32", "none", cut)
    parts = with_kernels(parts, shape, 8, "fp32", Kernels(kernel), "none", cut)
    # Log-softmax waits for backward, the logits do not.
    assert found == pytest.approx(parts["activations"] + parts["logits"] / 2, rel=0.02)
    if way == "ring":
        alone = kept_for_backward(cut_model(1, rotary=rotary), 8)
        assert found == pytest.approx(alone / cp, rel=0.005)
