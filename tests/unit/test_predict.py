"""What a layout costs: against models that are really cut, numbers worked by hand, and rules that
must hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoray.cli.forecast.job import AssumedDevice, Job
from nanoray.cli.forecast.layouts import candidates, refusal, search
from nanoray.cli.forecast.links import (
    Link,
    Topology,
)
from nanoray.cli.forecast.parallelisms.record import divisors
from nanoray.cli.forecast.predict import Cost, OnTopology, Speed, flops_of, predict
from nanoray.cli.forecast.rank_memory import memory_of, rank_memory
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config import Batch, make_config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.models.costs import (
    Cut,
    activation_memory,
    count_parameters,
    flops_per_token,
)
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.weights import weights_of
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.schedules import in_flight
from nanoray.parallel.tp import cut
from tests.harness.factorizations import factorizations
from tests.harness.talks import sent as bytes_sent

# 256 rows with padding
SHAPE = ModelShape(n_layer=4, n_head=8, n_embd=64, block_size=16, bias=True, vocab_size=250)
OF_SHAPE = {"n_layer": 4, "n_head": 8, "n_embd": 64, "block_size": 16, "bias": True}
NODES = Topology(
    ranks_per_node=4,
    intra=Link(alpha_us=1, bandwidth_gb_per_s=100),
    inter=Link(alpha_us=10, bandwidth_gb_per_s=20),
    peak_tflops=100,
    mfu=0.5,
)
SPEED = Speed(1e12, 1e12)


class Experts(NamedTuple):
    """The sizes of a shape's experts."""

    count: int
    per_token: int
    hidden: int
    shared: int = 0


def job(
    sequences: int = 64,
    precision: str = "fp32",
    schedule: str = "1f1b",
    chunks: int = 0,
    experts: Experts | None = None,
    bucket_mb: float = 0.05,
    **settings: Any,
) -> Job:
    of_experts = {}
    if experts is not None:
        of_experts = {
            "experts": experts.count,
            "experts_per_token": experts.per_token,
            "expert_hidden": experts.hidden,
            "shared_experts": experts.shared,
        }
    config = make_config({**OF_SHAPE, "micro_batch_size": 1, **of_experts, **settings})
    # A configuration without a pipeline refuses these keys; a search tries pipelines with them.
    config = config.model_copy(update={"pp_schedule": schedule, "pp_chunks": chunks})
    return Job(shape_with(experts), config, sequences, precision, bucket_mb)


def shape_with(experts: Experts | None) -> ModelShape:
    if experts is None:
        return SHAPE
    return replace(
        SHAPE,
        experts=experts.count,
        experts_per_token=experts.per_token,
        expert_hidden=experts.hidden,
        shared_experts=experts.shared,
    )


class Counted(Axis):
    """An axis that exchanges nothing and notes what it would have."""

    seen: list[tuple[str, int]]

    def start_all_gather(self, flat: Tensor, what: str, bucket: int | None = None) -> Any:
        self.seen.append(("all_gather", flat.nbytes))
        flat.view(self.size, -1).copy_(
            flat.view(self.size, -1)[self.index].clone().expand(self.size, -1)
        )
        return lambda: None

    def start_reduce_scatter(
        self, flat: Tensor, what: str, bucket: int | None = None, last: bool = False
    ) -> Any:
        self.seen.append(("reduce_scatter", flat.nbytes))
        return lambda out: out.copy_(flat.view(self.size, -1)[self.index])

    def _all_reduce(self, tensor: Tensor, what: str, op: Any) -> Tensor:
        self.seen.append((what, tensor.nbytes))
        return tensor


def cut_model(
    tp: int, kept: str = "none", device: str = "meta", sequence: bool = False
) -> tuple[GPT, Counted]:
    axis = Counted(
        "tp", tuple(range(tp)), 0, None, Mesh(0, tp, 0, torch.device(device), "none", "test")
    )
    axis.seen = []
    with torch.device(device):
        model = GPT(SHAPE, 0.0, kept)
        if tp > 1:
            cut(model, axis, sequence)
    return model, axis


# Parameters and FLOPs


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_flops_of_all_stages_are_those_of_the_model(pp: int) -> None:
    stages = [flops_of(job(), Layout(pp=pp), stage) for stage in range(pp)]
    assert sum(f + b for f, b in stages) == flops_per_token(SHAPE)
    assert sum(b for _, b in stages) == 2 * sum(f for f, _ in stages)
    again = flops_of(job(activation_checkpointing="block"), Layout(), 0)
    # Matrices, biases and norms; attention
    layers = 4 * (2 * 12 * 64**2 + 2 * (8 + 5) * 64 + 4 * 64 * 16)
    assert again[1] - again[0] - flops_of(job(), Layout(), 0)[0] == pytest.approx(layers, rel=0.01)


def test_experts_by_hand() -> None:
    """4 experts of 2 chosen: their weights are shared over ep, and two of them compute a token."""
    experts = Experts(count=4, per_token=2, hidden=128)
    some = job(experts=experts)
    tensors = weights_of(some.shape, Layout(dp=4, ep=2), 0)
    routed = sum(t.numel for t in tensors if t.expert)
    assert routed == 4 * 2 * (2 * 64 * 128 + 128 + 64)  # 4 layers, 2 of the 4 experts
    forward, _ = flops_of(some, Layout(dp=4, ep=2), 0)
    dense, _ = flops_of(job(), Layout(), 0)
    chosen, mlp = 2 * (2 * 64 * 128 + 128 + 64), 2 * 4 * 64**2 + 5 * 64
    assert forward - dense == 4 * 2 * (chosen + 64 * 4 - mlp)  # the router: 64·4
    talks = {t.what: t for t in talks_of(some, Layout(dp=4, ep=2), 2, 0) if t.axis in ("ep", "edp")}
    there = talks["tokens to experts and back"]
    # 8 micro batches; 2·16 tokens, twice each
    assert (there.times, there.nbytes) == (8 * 4 * 2, 4 * 2 * 16 * 64 * 2)
    assert bytes_sent(there, 2) == there.times * there.nbytes / 2
    assert talks["gradients"].times * talks["gradients"].nbytes == 4 * routed
    layout = Layout(dp=4, tp=2, ep=2)
    halved = sum(t.numel for t in weights_of(some.shape, layout, 0) if t.expert)
    assert halved == 4 * 2 * (2 * 64 * 64 + 64 + 64), (
        "tp cuts hidden units; down's biases are whole"
    )
    talks = {t.what: t for t in talks_of(some, layout, 2, 0) if t.axis == "tp"}
    assert talks["activations"].times == 2 * 4 * 8, (
        "attention and experts of 4 layers, 8 micro batches"
    )
    gates = talks["gradients of gates"]
    assert (gates.times, gates.nbytes) == (4 * 8, 2 * 16 * 2 * 4)


# Memory


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_really_kept_for_backward_is_what_the_formula_says(sequence: bool) -> None:
    model, _ = cut_model(2, "none", "cpu", sequence)
    x, saved = (
        torch.randint(250, (8, 16), generator=torch.Generator().manual_seed(0)),
        dict[int, int](),
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x, x)
    formula = activation_memory(SHAPE, 8, "fp32", "none", Cut(2, 1, sequence))
    assert sum(saved.values()) == pytest.approx(
        sum(formula.values()) - 4 * 8 * 16 * 128, rel=0.03
    ), loss


def test_what_stages_keep_in_flight() -> None:
    """Four stages of eight micro batches, as drawn in the papers."""

    def kept(schedule: str, micro: int, chunks: int = 1) -> list[int]:
        return [sum(in_flight(schedule, 4, stage, micro, chunks)) for stage in range(4)]

    assert kept("gpipe", 8) == [8] * 4
    assert kept("1f1b", 8) == [4, 3, 2, 1]
    assert kept("1f1b", 2) == [2, 2, 2, 1]
    assert kept("interleaved", 8, 2) == [11, 9, 7, 5]
    some = job(64)
    layout = Layout(dp=2, pp=4)
    config, batch = some.config_at(layout), Batch(1, 32, 2)
    device = AssumedDevice("cpu", "fp32", 0.05, mirrored=False)
    first, last = (rank_memory(config, SHAPE, layout, batch, device, stage) for stage in (0, 3))
    one = activation_memory(replace(SHAPE, n_layer=1), 1, "fp32")
    layer = (
        activation_memory(replace(SHAPE, n_layer=2), 1, "fp32")["activations"] - one["activations"]
    )
    # A layer each, 4 against 1 in flight. Of 16 tokens the first stage keeps 8 bytes, their
    # indices; the last their targets, 64 float32 of its norm and of the head's input each, and the
    # norm's 2 float32.
    assert first["activations"] == 4 * (layer + 16 * 8)
    assert last["activations"] == layer + 16 * (8 + 2 * 4 * 64 + 2 * 4)
    assert not first["logits"]
    assert last["logits"] == one["logits"]
    assert (
        memory_of(job(64, schedule="gpipe"), Layout(dp=2, pp=4), 1)["activations"]
        > first["activations"]
    )


MODES = st.sampled_from(["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"])


# What travels


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tp_sends_what_a_cut_model_sends(checkpointing: str, precision: str) -> None:
    model, axis = cut_model(2, checkpointing, "cpu")
    x = torch.randint(250, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, x)
    loss.backward()
    found = Counter(size for _, size in axis.seen)
    some = job(2, precision, activation_checkpointing=checkpointing)
    talks = [t for t in talks_of(some, Layout(tp=2), 2, 0) if t.axis == "tp"]
    assert sum(t.times for t in talks) == sum(found.values())
    assert sum(t.times * t.nbytes for t in talks) == sum(size * n for size, n in found.items())


@pytest.mark.parametrize(
    ("mode", "accum", "passes"),
    [("ddp", 4, 2), ("ddp_by_hand", 4, 2), ("zero1", 4, 2), ("zero2", 1, 2), ("fsdp", 1, 3)],
)
def test_data_parallel_bytes_are_the_table_of_the_page(mode: str, accum: int, passes: int) -> None:
    """8P·(n-1)/n, and 12P with fsdp full but for what is outside of blocks, which is gathered once
    per micro batch; zero2 and fsdp send more with accumulation.
    """
    P = count_parameters(SHAPE)
    outside = sum(t.numel for t in weights_of(job().shape, Layout(), 0) if t.layer is None)

    def sent(accum: int) -> float:
        talks = talks_of(job(4 * accum, dp_mode=mode), Layout(dp=4), 1, 0)
        kept = accum * outside if mode == "fsdp" else 0
        return sum(bytes_sent(talk, 4) for talk in talks) + 4 * kept * 3 / 4

    assert sent(accum) == pytest.approx(4 * passes * P * 3 / 4)
    assert sent(1) == pytest.approx(4 * passes * P * 3 / 4)
    more = {"zero2": 1, "fsdp": 2}.get(mode, 0)
    assert sent(2) == pytest.approx(4 * (passes + more) * P * 3 / 4)


# Links


# A step

FREE = NODES.model_copy(
    update={key: Link(alpha_us=0, bandwidth_gb_per_s=1e12) for key in ("intra", "inter")}
)


def test_a_step_of_tp_by_hand() -> None:
    """One rank's compute halves; all of its sums are waited for, one after the other."""
    some = job(2)
    alone, two = (predict(some, Layout(tp=tp), 2, OnTopology(NODES), SPEED) for tp in (1, 2))
    assert two.parts["compute"] == pytest.approx(alone.parts["compute"] / 2)
    sums = [(t.times, t.nbytes) for t in talks_of(some, Layout(tp=2), 2, 0)]
    assert two.parts["tp"] == pytest.approx(sum(n * (2e-6 + size / 100e9) for n, size in sums))
    assert two.step_s == pytest.approx(two.parts["compute"] + two.parts["tp"])
    half = predict(some, Layout(tp=2), 2, OnTopology(NODES), replace(SPEED, uncut=0.5))
    assert half.parts["compute"] == pytest.approx(0.75 * alone.parts["compute"])


class Fixed(NamedTuple):
    """A network on which every message takes the same."""

    each: Cost

    def cost(self, layout: Layout, axis: str, op: str, nbytes: float) -> Cost:
        return self.each


@pytest.mark.parametrize("mode", ["ddp", "ddp_by_hand", "zero2"])
def test_gradients_travel_beside_backward_by_hand(mode: str) -> None:
    """A backward of 1 s or more hides all messages of 1 ms but those of the last bucket."""
    some = job(4, dp_mode=mode)
    tensors = weights_of(SHAPE)
    nbytes = 4 * sum(tensor.numel for tensor in tensors)
    buckets = -(-nbytes // round(0.05 * 2**20))
    last = 4 * tensors[0].numel / nbytes  # the tied embedding, larger than a bucket
    assert last > 1 / buckets
    sent_s = 1e-3 * buckets * (2 if mode == "ddp_by_hand" else 1)
    # zero2 sends the gradients of both micro batches, and weights after the update.
    turns, after_s = (2, 1e-3 * buckets) if mode == "zero2" else (1, 0.0)

    def dp_s(speed: Speed, cpu: float = 0.0) -> float:
        step = predict(some, Layout(dp=2), 1, Fixed(Cost(1e-3, cpu)), speed)
        assert step.step_s == pytest.approx(sum(step.parts.values()))
        return step.parts["dp"] - after_s

    slow = Speed(1e6, 1e6)
    assert dp_s(slow) == pytest.approx(turns * last * sent_s)
    assert dp_s(Speed(1e15, 1e15)) == pytest.approx(turns * sent_s, rel=1e-4), "nothing hides it"
    # On one core, messages that want half of it take as much from compute.
    shared_s = (1 - last) * sent_s * 0.5 + last * sent_s
    assert dp_s(replace(slow, cores=1), cpu=0.5) == pytest.approx(turns * shared_s)


def test_more_ranks_than_cores_stretch_a_step() -> None:
    fast, slow = (
        predict(job(8), Layout(dp=2), 4, OnTopology(FREE), replace(SPEED, cores=cores)).step_s
        for cores in (1, 0.25)
    )
    assert slow == pytest.approx(4 * fast)


# The search


@pytest.mark.parametrize("ranks", [1, 12, 36, 97])
def test_every_factorization_once(ranks: int) -> None:
    def tried(tokens: int, experts: Experts | None = None) -> list[Layout]:
        shape = replace(shape_with(experts), block_size=tokens)
        return [*candidates(replace(job(), shape=shape), ranks)]

    # Sequences that any number of ranks may cut
    long = 2 * 128 * ranks
    found = tried(long)
    assert len(found) == len(set(found))
    assert set(found) == factorizations(ranks)
    # A rank of cp takes two equal parts of a sequence, together 128 tokens or more.
    parts = {one.cp for one in tried(1536)}
    assert parts == {cp for cp in (1, 2, 3, 4, 6, 12) if ranks % cp == 0}
    assert set(tried(long, Experts(6, 2, 64))) == factorizations(ranks, experts=True)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.sampled_from([1, 2, 4, 6, 8, 16, 32]), MODES, st.sampled_from([None, 0.003, 0.01]))
def test_a_search_returns_the_fastest_step_of_each_layout_that_fits(
    ranks: int, mode: str, memory_gb: float | None
) -> None:
    some = job(192, dp_mode=mode)
    found = search(some, ranks, 16, OnTopology(NODES), SPEED, memory_gb)
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    best = {one.layout: one for one in found}
    for layout in factorizations(ranks, tokens=SHAPE.block_size):
        steps = []
        for micro in divisors(192 // layout.dp) if not refusal(some, layout) else []:
            step = predict(some, layout, micro, OnTopology(NODES), SPEED)
            fits = memory_gb is None or sum(step.memory.values()) <= 1e9 * memory_gb
            if micro <= 16 and fits:
                steps.append(step.step_s)
        assert (layout in best) == bool(steps)
        if steps:
            assert best[layout].step_s == min(steps)


@pytest.mark.parametrize(
    ("axis", "more"),
    [
        ("tp", {}),
        ("tp", {"sequence_parallel": True}),
        ("tp", {"audit_every": 5}),
        ("cp", {}),
        ("pp", {}),
        ("pp", {"compile": "cuda_graphs", "dp_mode": "ddp"}),
        ("ep", {"experts": 6, "expert_hidden": 48}),
    ],
)
def test_a_search_refuses_what_a_start_refuses(axis: str, more: dict[str, Any]) -> None:
    """The sizes that do not divide, and settings that do not go together, in the same words."""
    values = {**OF_SHAPE, "micro_batch_size": 1, "dp_mode": "ddp_by_hand", **more}
    whole = {key: value for key, value in values.items() if key != "sequence_parallel"}
    config = make_config(whole).model_copy(update=values)
    # All ranks divide the sequences of a step.
    some = Job(ModelShape.of(config, SHAPE.vocab_size), config, 840, "fp32", 0.05)

    refused = []
    for size in range(2, 9):
        layout = Layout(dp=size, ep=size) if axis == "ep" else Layout(**{axis: size})
        reason = ""
        try:
            make_config(values | {axis: size, "dp_mode": some.mode(layout)})
        except ConfigError as error:
            reason = str(error)
            refused.append(size)
        found = refusal(some, layout) or ""
        # A search also knows the vocabulary, which tp has to divide.
        assert found.split(",")[0] == reason.split(",")[0]
    assert refused, "no size breaks a rule, so nothing was compared"
    assert refusal(some, Layout()) is None
    assert refusal(some, Layout(dp=9)) == "dp = 9 does not divide the step's 840 sequences"
