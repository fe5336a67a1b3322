"""Context parallelism without process groups: who has which positions, what a rank computes with each
block, what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import Batch, make_config
from nanoray.config.layout import Layout
from nanoray.data.sequence_part import SequencePart
from nanoray.data.tokens import MicroBatches
from nanoray.errors import ConfigError
from nanoray.launch.recovery.shares import Shares
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel import cp, cp_blocks, tp
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh

RANKS = (2, 3, 4, 5)
SHAPE = ModelShape(n_layer=1, n_head=2, n_embd=8, block_size=24, bias=True, vocab_size=65)


def axis_of(index: int, ranks: int) -> Axis:
    """An axis on which nothing may be sent."""
    mesh = Mesh(index, ranks, index, torch.device("cpu"), "none", "test")
    return Axis("cp", tuple(range(ranks)), index, None, mesh)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_position_is_on_one_rank_and_work_is_equal(ranks: int) -> None:
    """Also by the masks: the pairs of query and key that a rank computes over all blocks are those
    that attention needs, each once, and each rank has as many.
    """
    T = 2 * ranks * 2
    positions = torch.arange(T)
    parts = [SequencePart(index, ranks) for index in range(ranks)]
    owned = [part.own(positions, 0) for part in parts]
    assert torch.cat(owned).sort().values.tolist() == positions.tolist()

    pairs = torch.zeros(T, T, dtype=torch.int64)
    counts = []
    for own in range(ranks):
        before = pairs.sum()
        for other in range(ranks):
            work = cp.work_with(own, other, T // ranks)
            queries = owned[own][work.queries]
            keys = owned[other][work.keys]
            seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
            if work.causal:
                seen = seen.tril()
            pairs[queries[:, None], keys[None, :]] += seen
        counts.append(int(pairs.sum() - before))
    assert torch.equal(pairs, torch.ones(T, T, dtype=torch.int64).tril())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("kernel", ["plain", "flash"])
@pytest.mark.parametrize(("T", "S", "causal"), [(6, 6, True), (6, 6, False), (3, 6, False)])
def test_a_block_is_torchs_attention(kernel: str, T: int, S: int, causal: bool) -> None:
    """Result, sums, and gradients; the sums are the logarithms of the softmax's denominators."""
    source = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, T, 8, generator=source, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, 3, S, 8, generator=source, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    grad = torch.randn(2, 3, T, 8, generator=source, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        y, sums = cp_blocks.forward(q, k, v, causal, kernel)
        found = cp_blocks.backward(grad, q, k, v, y, sums, causal, kernel)
    for mine, its in zip((y, *found), (expected.detach(), *gradients), strict=True):
        assert torch.allclose(mine, its, atol=1e-12)
    if not causal:
        scores = (q @ k.transpose(-2, -1)).detach() * 8**-0.5
        assert torch.allclose(sums, scores.logsumexp(-1), atol=1e-12)


def test_two_blocks_together_are_one() -> None:
    """Also where one has scores that the other's are nothing beside."""
    q, k, v = (torch.randn(1, 1, 4, 4, dtype=torch.float64) for _ in range(3))
    k[:, :, 2:] *= 100
    whole, sums = cp_blocks.forward(q, k, v, False, "plain")
    halves = []
    for half in (slice(0, 2), slice(2, 4)):
        halves += cp_blocks.forward(q, k[:, :, half], v[:, :, half], False, "plain")
    y, total = cp_blocks.combine(*halves)
    assert torch.allclose(y, whole)
    assert torch.allclose(total, sums)


# The model.


def cut(index: int, ranks: int, sequence: int = 1, **more: Any) -> GPT:
    """A model that tp has cut over `sequence` ranks and cp over `ranks`."""
    torch.manual_seed(1)
    model = GPT(SHAPE, **more)
    if sequence > 1:
        tp.cut(model, axis_of(0, sequence), sequence=True)
    cp.cut(model, axis_of(index, ranks))
    return model


def test_a_cut_model_keeps_its_weights_and_their_names() -> None:
    torch.manual_seed(1)
    whole = dict(GPT(SHAPE).named_parameters())
    for sequence in (1, 2):
        own = dict(cut(1, 3, sequence).named_parameters())
        assert own.keys() == whole.keys()
    assert all(torch.equal(p, whole[name]) for name, p in cut(1, 3).named_parameters())


@pytest.mark.parametrize("ranks", [2, 3])
def test_learned_positions_are_those_of_the_whole_sequence(ranks: int) -> None:
    """Of a shorter sequence, too; with sequence_parallel a rank of tp has its share of them."""
    for index in range(ranks):
        model = cut(index, ranks)
        for T in (24, 12):
            expected = SequencePart(index, ranks).own(model.pos_emb.weight[:T], 0)
            assert torch.equal(model.pos_emb(0, T // ranks), expected)
        shared = cut(index, ranks, 2)
        expected = SequencePart(index, ranks).own(shared.pos_emb.weight, 0)
        assert torch.equal(shared.pos_emb(0, 24 // ranks), expected[: 24 // ranks // 2])


def test_rotary_positions_are_those_of_the_whole_sequence() -> None:
    whole = torch.randn(2, 3, 12, 8)
    for index in range(3):
        part = SequencePart(index, 3)
        expected = part.own(cp.rotate(whole), 2)
        assert torch.allclose(cp.rotate_own(part.own(whole, 2), part), expected, atol=1e-6)


def test_a_model_is_released_and_cut_again_for_the_next_group() -> None:
    model = cut(0, 2)
    attention = model.blocks[0].attn
    cp.release(model)
    with pytest.raises(AssertionError, match="the group of ranks was left"):
        attention.heads(torch.zeros(1, 4, 8))
    cp.cut(model, axis_of(1, 2))
    assert attention.context.index == 1
    assert model.pos_emb.part == SequencePart(1, 2)


# Samples.


class Rows:
    """Samples of 24 tokens: their own numbers."""

    def train_batch(self, first_sample: int, count: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(first_sample * 24, (first_sample + count) * 24).view(count, 24)
        return x, x + 1

    def val_windows(self, limit: int) -> np.ndarray:
        return np.arange(limit)

    def val_batch(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.train_batch(int(starts[0]), len(starts))


def test_ranks_read_their_parts_of_the_same_samples() -> None:
    """Of training, of evaluation, and of samples that are cut into shorter sequences first."""
    batch = Batch(2, 1, 1)
    for length_at, length in ((None, 24), (lambda step: 12, 12)):
        whole = MicroBatches(Rows(), batch, 0, length_at)
        for index in range(2):
            part = SequencePart(index, 2)
            own = MicroBatches(Rows(), batch, 0, length_at, part)
            for mine, its in zip(own.get(4, 0), whole.get(4, 0), strict=True):
                assert mine.shape == (2 * 24 // length, length // 2)
                assert torch.equal(mine, part.own(its))
    own = MicroBatches(Rows(), batch, 0, part=SequencePart(1, 2))
    for mine, its in zip(
        own.val_batch(np.array([3])), Rows().val_batch(np.array([3])), strict=True
    ):
        assert torch.equal(mine, SequencePart(1, 2).own(its))


# Meshes, recovery, refusals.


def test_torchs_ddp_takes_no_pipeline_of_several_parts() -> None:
    """One data replica is not enough: two ranks with parts of its sequences share gradients, too."""
    config = make_config({"micro_batch_size": 1, "cp": 2, "pp": 2})
    with pytest.raises(ConfigError, match="dp_mode = ddp with pp = 2 and dp = 1 and cp = 2: torch"):
        Layout.of(config, 4)
    assert Layout.of(config.model_copy(update={"dp_mode": "zero1"}), 4).world_size == 4


@pytest.mark.parametrize(
    ("settings", "ranks", "recovers"),
    [
        ({"cp": 2}, 2, True),
        ({"cp": 2, "dp_mode": "zero1"}, 2, True),
        ({"cp": 2, "tp": 2}, 4, True),
        ({"tp": 2, "dp_mode": "zero1"}, 2, False),
        ({"cp": 2, "tp": 2, "dp_mode": "fsdp"}, 4, True),
    ],
)
def test_ranks_with_other_parts_of_a_sequence_replace_each_others_state(
    settings: dict[str, Any], ranks: int, recovers: bool
) -> None:
    config = make_config({"micro_batch_size": 1, **settings})
    assert recovers_in_place(config, "gloo", ranks) is recovers


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({}, [(0, 1, 2, 3)]),
        ({"tp": 2}, [(0, 2), (1, 3)]),
        ({"dp_mode": "zero1"}, [(0, 1), (1, 2), (2, 3), (3, 0)]),
    ],
)
def test_a_share_is_lost_only_with_all_parts_of_the_sequences(
    settings: dict[str, Any], held: list[tuple[int, ...]]
) -> None:
    config = make_config({"micro_batch_size": 1, "cp": 2, **settings})
    assert [*Shares.of(config, "gloo", range(4), range(4), 4).held] == held


# The trace.
