"""The memory timeline: by hand, against torch's own count of allocations, and on real ranks without
a changed bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanoray.checkpoint.run import RunSpec
from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.tools.inspect.__main__ import main
from nanoray.tools.report.memory import read_memory
from nanoray.train.watch.memory_timeline import CATEGORIES, FORWARD, Storages, summary
from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, run_ranks, series

RECIPE: dict[str, Any] = {
    "max_steps": 4,
    "global_batch_size": 12,
    "dropout": 0.1,
    "precision": "fp32",
}
LAYERS = 2 * (12 * 32**2 + 2 * 32) + 32  # parameters of TINY without its embeddings


class Watched(Storages):
    """Storages that are told the phase by hand."""

    def __init__(self) -> None:
        self.phase = "forward"
        kind = lambda: FORWARD if self.phase == "forward" else "other"  # noqa: E731
        super().__init__(torch.device("cpu"), lambda: self.phase, kind)


def step(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, storages: Watched
) -> None:
    """Do what MemoryTimeline does in a step of one process."""
    storages.note(model.parameters(), "weights", always=True)
    with storages:
        y = model(x).sum()
        storages.keep()
        storages.phase = "backward"
        y.backward()
        storages.phase = "optimizer"
        storages.note([p.grad for p in model.parameters()], "gradients", always=True)
        del y
        optimizer.step()
        storages.note(
            [v for kept in optimizer.state.values() for v in kept.values()],
            "optimizer",
            always=True,
        )


def test_a_small_step_by_hand() -> None:
    """(64, 8) @ (8, 16), ReLU, @ (16, 4): views count once, what is freed counts no more."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    weights, x, storages = 4 * (8 * 16 + 16 * 4), torch.randn(64, 8), Watched()
    step(model, x, torch.optim.AdamW(model.parameters(), fused=True), storages)
    found = summary(storages)
    # Before backward: x, and what ReLU returned for the second product (ReLU's own input is freed);
    # the loss.
    hidden, result = 4 * 64 * 16, 4 * 64 * 4
    assert found["most"]["weights"] == found["most"]["gradients"] == weights
    assert found["most"]["optimizer"] == 2 * weights + 2 * 4, (
        "two moments, and a step for each tensor"
    )
    assert found["most"]["activations"] == hidden + 4
    assert found["most"]["buckets"] == 0
    end = dict(zip(CATEGORIES, found["points"][-1][2:], strict=True))
    assert end == {**found["most"], "activations": 0, "other": x.nbytes}, (
        "what backward has read is freed"
    )
    peak = found["peak"]
    assert (
        peak["bytes"]
        == sum(peak[name] for name in CATEGORIES)
        == max(sum(p[2:]) for p in found["points"])
    )
    # The second product's result is there with ReLU's, and ReLU's input is gone.
    forward = [sum(p[2:]) for p in found["points"] if found["places"][p[1]] == "forward"]
    assert max(forward) == weights + x.nbytes + max(2 * hidden, hidden + result + 4)


def test_the_sum_moves_as_the_allocator_does() -> None:
    """torch's profiler tells each allocation of the CPU's allocator: the same peak above the
    beginning, and end.

    A kernel's own workspace is not seen: that of a LayerNorm, or of a product with strides of 0, so
    none is here.
    """
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
    x, storages = torch.randn(128, 64), Watched()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(model, x, optimizer, storages)
    level, levels = 0, [0]
    for event in sorted(events(seen), key=lambda event: event.start_time_ns):
        level += event.extra_fields.alloc_size
        levels.append(level)
    table = storages.totals().sum(1)
    base = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert int(table.max()) - base == pytest.approx(max(levels), rel=0.02)
    assert int(table[-1]) - base == pytest.approx(levels[-1], rel=0.02)


def events(seen: Any) -> list[Any]:
    from torch._C._profiler import _EventType

    todo, found = list(seen.profiler.kineto_results.experimental_event_tree()), []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            found.append(event)
    return found


def trained(text: Path, out: Path, world: int, **settings: Any) -> RunSpec:
    spec = make_spec(text, out, **RECIPE | settings)
    assert [o["exit_reason"] for o in run_ranks(spec, world)] == ["finished"] * world
    return spec


MODES = [
    pytest.param(2, {"dp_mode": "zero2", "bucket_mb": 0.03}),
    pytest.param(
        1, {"grad_accum_steps": 2, "activation_checkpointing": "block"}, marks=pytest.mark.full
    ),
    pytest.param(2, {"dp_mode": "ddp"}, marks=pytest.mark.full),
    pytest.param(2, {"dp_mode": "fsdp"}, marks=pytest.mark.full),
    pytest.param(
        4,
        {"tp": 2, "pp": 2, "grad_accum_steps": 2, "dp_mode": "ddp_by_hand"},
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("world", "settings"), MODES)
def test_each_rank_records_one_step_and_no_bit_changes(
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    world: int,
    settings: dict[str, Any],
) -> None:
    plain = trained(text, tmp_path / "plain", world, **settings)
    looked = trained(text, tmp_path / "looked", world, memory_at=3, **settings)
    assert series(looked) == series(plain)
    assert equal(final(looked), final(plain))
    assert not (plain.folder / "memory").exists()
    found = read_memory(looked.folder)
    assert [(of_rank["rank"], of_rank["step"]) for of_rank in found] == [
        (rank, 3) for rank in range(world)
    ]
    for of_rank in found:
        most, formula, peak = of_rank["most"], of_rank["formula"], of_rank["peak"]
        assert peak["bytes"] == sum(peak[name] for name in CATEGORIES)
        assert peak["other"] < 0.5 * peak["activations"]
        # Their parts are never there together
        if not {"pp", "activation_checkpointing"} & {*settings}:
            assert peak["bytes"] == pytest.approx(formula["peak"], rel=0.25)
        assert most["weights"] == pytest.approx(formula["weights"], rel=0.001)
        assert most["gradients"] == pytest.approx(formula["gradients"], rel=0.001)
        assert most["optimizer"] == pytest.approx(formula["optimizer"], rel=0.002), (
            "and a step for each tensor"
        )
        assert (most["buckets"] > 0) == (formula["buckets"] > 0)
    if (
        looked.config.dp_mode == "zero2"
    ):  # what moves at once and what stays, to the byte: 16 elements a slice divide all tensors here
        count = 4 * (LAYERS + looked.config.n_embd * (256 + looked.config.block_size))
        for of_rank in found:
            assert of_rank["most"]["weights"] == count
            assert of_rank["most"]["gradients"] == count // 2
            assert of_rank["most"]["optimizer"] - count in range(0, 4 * 20, 4), (
                "8 bytes for half of them, and steps"
            )
        assert main([str(looked.folder)]) == 0
        assert (
            f"memory of step 3, rank 1 on cpu: {peak['bytes'] / 2**20:.3f} MiB at most"
            in capsys.readouterr().out
        )


def test_what_would_record_nothing_is_refused() -> None:
    small = {"micro_batch_size": 1, "max_steps": 9}
    with pytest.raises(
        ConfigError, match="memory_at = 10 would record nothing: the run ends at step 9; use a step"
    ):
        make_config(small | {"memory_at": 10})
    with pytest.raises(
        ConfigError, match="memory_at = 6 would record nothing: the run ends at step 5"
    ):
        make_config(small | {"memory_at": 6, "stop_at": 5})
    with pytest.raises(
        ConfigError, match="memory_at = 6 with compile = True: allocations of compiled layers"
    ):
        make_config(small | {"memory_at": 6, "compile": True})
