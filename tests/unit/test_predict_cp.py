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
from nanoray.cli.forecast.rank_memory import rank_memory
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config import Batch, make_config
from nanoray.config.layout import Layout
from nanoray.models.costs import Cut, activation_memory, with_kernels
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.kernels import Kernels
from nanoray.models.moe import RouterTraining
from nanoray.parallel import cp as context
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh

# 256 rows with padding
SHAPE = ModelShape(n_layer=4, n_head=8, n_embd=64, block_size=16, bias=True, vocab_size=250)
MODES = ["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"]


def job(sequences: int = 64, precision: str = "fp32", tokens: int = 16, **settings: Any) -> Job:
    config = make_config({"micro_batch_size": 1, "block_size": tokens, **settings})
    return Job(replace(SHAPE, block_size=tokens), config, sequences, precision, 0.05)


def rank_memory_of(some: Job, layout: Layout, micro: int, stage: int) -> dict[str, int]:
    batch = Batch(micro, some.sequences // (layout.dp * micro), layout.dp)
    device = AssumedDevice("cpu", some.precision, some.bucket_mb, mirrored=False)
    return rank_memory(some.config_at(layout), some.shape, layout, batch, device, stage)


# What travels


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


# Seconds


# Against a model that is really cut


class Counted(Axis):
    """An axis that exchanges nothing and notes what it would have: (kind, bytes)."""

    seen: list[tuple[str, int]]

    def start_pass_on(self, tensor: Tensor, distance: int, what: str) -> Any:
        self.seen.append((what, tensor.nbytes))
        received = tensor.clone()
        return lambda: received


class CutModel(NamedTuple):
    model: GPT
    axis: Counted
    shape: ModelShape


def cut_model(cp: int, kept: str = "none", kernel: str = "flash", **settings: Any) -> CutModel:
    """A model of 2 blocks on the rank of cp that attends to most."""
    mesh = Mesh(0, cp, 0, torch.device("cpu"), "none", "test")
    axis = Counted("cp", tuple(range(cp)), cp - 1, None, mesh)
    axis.seen = []
    shape = replace(SHAPE, n_layer=2, block_size=128, **settings)
    model = GPT(shape, 0.0, kept, RouterTraining(), Kernels(kernel))
    if cp > 1:
        context.cut(model, axis)
    return CutModel(model, axis, shape)


@pytest.mark.parametrize("kept", ["none", "selective", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cut_model_sends_what_the_formula_says(kept: str, precision: str) -> None:
    model, axis, shape = cut_model(4, kept)
    x = torch.randint(250, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, x)
    loss.backward()
    some = job(2, precision, activation_checkpointing=kept, cp=4, tokens=128)
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
@pytest.mark.parametrize("cp", [2, 4])
def test_a_cut_model_keeps_what_the_formula_says(cp: int, rotary: bool, kernel: str) -> None:
    """And the ring keeps what a model that is not cut keeps of as many tokens with flash."""
    found = kept_for_backward(cut_model(cp, kernel=kernel, rotary=rotary), 8)
    shape = cut_model(1, rotary=rotary).shape
    cut = Cut(cp=cp)
    parts = activation_memory(shape, 8, "fp32", "none", cut)
    parts = with_kernels(parts, shape, 8, "fp32", Kernels(kernel), "none", cut)
    # Log-softmax waits for backward, the logits do not.
    assert found == pytest.approx(parts["activations"] + parts["logits"] / 2, rel=0.02)
    alone = kept_for_backward(cut_model(1, rotary=rotary), 8)
    assert found == pytest.approx(alone / cp, rel=0.005)
