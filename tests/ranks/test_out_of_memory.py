"""A step that runs out of memory is done again with a smaller micro batch: no step is lost, and the
losses are, to the bit, those of a run that goes on with that micro batch.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nanoray import RuntimeEngine
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import DataError, DataFailed, MemoryExhausted
from tests.harness.axes import equal, final
from tests.harness.elastic import run_elastic
from tests.harness.ranks import make_spec, records, run_ranks, series

STEP = 4  # the one that is done again
# Plain SGD without clipping: a constant factor on a gradient would show
RECIPE: dict[str, Any] = {
    "precision": "fp32",
    "optimizer": "sgd",
    "lr": 0.1,
    "grad_clip": 0.0,
    "max_steps": 6,
    "eval_every": 3,
    "checkpoint_every": 3,
    "global_batch_size": 24,
    "grad_accum_steps": 2,
    "hash_every": 2,
    "bucket_mb": 0.02,
}
ROUNDING = 2e-5


def continued(text: Path, folder: Path, world: int, accum: int, settings: dict[str, Any]) -> Path:
    """Train STEP - 1 steps, then the rest with `accum` micro batches per step."""
    settings = RECIPE | settings
    first = make_spec(text, folder, **settings, stop_at=STEP - 1)
    rest = settings | {"grad_accum_steps": accum, "resume": str(first.folder)}
    for spec in (first, lambda: make_spec(text, folder, **rest)):
        outcomes = run_ranks(spec if isinstance(spec, RunSpec) else spec(), world)
        assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return first.folder


def shortages(spec: RunSpec) -> list[dict[str, Any]]:
    lines = (spec.folder / "faults.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "out_of_memory"]


MODES: list[Any] = [
    pytest.param(1, {}, id="one process", marks=pytest.mark.full),
    pytest.param(2, {"dp_mode": "zero1"}, id="zero1", marks=pytest.mark.full),
    pytest.param(2, {}, id="ddp", marks=pytest.mark.full),
    pytest.param(3, {"dp_mode": "zero2"}, id="zero2-3", marks=pytest.mark.full),
    pytest.param(3, {"dp_mode": "fsdp"}, id="fsdp-3", marks=pytest.mark.full),
    pytest.param(2, {"tp": 2}, id="tp"),
    pytest.param(2, {"pp": 2}, id="pp", marks=pytest.mark.full),
    pytest.param(2, {"pp": 2, "pp_schedule": "zero_bubble"}, id="zb", marks=pytest.mark.full),
    pytest.param(2, {"cp": 2}, id="cp", marks=pytest.mark.full),
    pytest.param(
        2,
        {"ep": 2, "experts": 4, "dp_mode": "zero1", "dropout": 0.1},
        id="ep",
        marks=pytest.mark.full,
    ),
    pytest.param(2, {"precision": "fp16"}, id="fp16", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "settings"), MODES)
def test_a_step_is_done_again_with_half_the_micro_batch(
    text: Path, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    """At several places of the step; then everywhere at once, which takes no other way."""
    larger = make_spec(text, tmp_path / "larger", **RECIPE | settings)
    assert not [o for o in run_ranks(larger, world) if "error" in o]
    smaller = continued(text, tmp_path / "smaller", world, 4, settings)
    ranks = range(world)
    plans = [
        f"no-memory@rank={world - 1},step={STEP},phase=forward",
        f"no-memory@rank=0,step={STEP},phase=backward,micro=1",
        ";".join(f"no-memory@rank={rank},step={STEP},phase=forward" for rank in ranks),
    ]
    if "pp" in settings:  # a later stage would only come to its forward in the next try
        del plans[-1]
    for number, plan in enumerate(plans):
        spec = make_spec(text, tmp_path / str(number), **RECIPE | settings | {"faults": plan})
        if world == 1:
            (outcome,) = run_ranks(spec, 1)
            assert "error" not in outcome, outcome
        else:
            group = run_elastic(spec, world)
            assert not [rank for rank in group.ranks.values() if "error" in rank], group
            assert len(group.left) == 1, "the ranks met once more"
        assert [record["step"] for record in records(spec)] == [*range(1, RECIPE["max_steps"] + 1)]
        assert series(spec) == series_of(smaller), "the bits of a run with the smaller micro batch"
        assert equal(final(spec), final_of(smaller))
        if not settings.keys() & {"dropout", "experts"} and settings.get("precision") != "fp16":
            assert series(spec) == pytest.approx(series(larger), abs=ROUNDING)
        (event,) = shortages(spec)
        assert event["step"] == STEP
        assert event["asked"] == 24 // 2 // (1 if set(settings) & {"tp", "pp", "cp"} else world)
        assert event["limit"] == event["asked"] // 2
        config = json.loads((spec.folder / "config.json").read_text())
        assert config["grad_accum_steps"] == 2, "config.json keeps what was asked for"


def series_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/loss"] for record in lines if "train/loss" in record}


def final_of(folder: Path) -> Any:
    return final(type("Spec", (), {"checkpoints": folder / "checkpoints"})())


# Not in forward or backward.


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_evaluation_is_done_again_too(text: Path, tmp_path: Path, mode: str) -> None:
    """The step before it is done, and is not repeated: the ranks meet, and take smaller micro batches."""
    plan = "no-memory@rank=1,step=3,phase=eval"
    settings = RECIPE | {"dp_mode": mode}
    spec = make_spec(text, tmp_path / "faulty", **settings | {"faults": plan})
    clean = make_spec(text, tmp_path / "clean", **settings)
    outcome = run_elastic(spec, 2)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert not [o for o in run_ranks(clean, 2) if "error" in o]
    assert [record["step"] for record in records(spec)] == [*range(1, RECIPE["max_steps"] + 1)]
    assert series(spec, "val/loss") == pytest.approx(series(clean, "val/loss"), abs=ROUNDING)
    assert [event["limit"] for event in shortages(spec)] == [3]


# A micro batch of one sequence, which is not halved
LEAST = RECIPE | {"global_batch_size": 2, "grad_accum_steps": 0, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        pytest.param(2, {"tp": 2}, id="no other rank has its weights"),
        pytest.param(2, {"dp_mode": "zero1", "mirror": "off"}, marks=pytest.mark.full),
    ],
)
def test_where_no_smaller_micro_batch_helps_the_steps_before_are_saved(
    text: Path, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    settings = LEAST | {"checkpoint_every": 0} | settings
    clean = make_spec(text, tmp_path / "clean", **settings)
    assert not [o for o in run_ranks(clean, world) if "error" in o]

    plan = f"no-memory@rank={world - 1},step={STEP},phase=backward"
    spec = make_spec(text, tmp_path / "full", **settings | {"faults": plan})
    outcomes = run_ranks(spec, 1) if world == 1 else [*run_elastic(spec, world).ranks.values()]
    for outcome in outcomes:
        assert outcome["error"] == "MemoryExhausted", "exit code 1: there are steps"
        assert f"in backward of step {STEP}" in outcome["message"]
        assert f"Saved at step {STEP - 1}; then resume" in outcome["message"]
    folder = spec.folder
    del spec  # a run is locked while it is open
    again = make_spec(text, tmp_path / "full", **settings | {"resume": str(folder)})
    assert not [o for o in run_ranks(again, world) if "error" in o]
    assert series(again) == series(clean)
    assert equal(final(again), final(clean))


def test_a_step_whose_evaluation_does_not_fit_is_saved_and_recorded(
    text: Path, tmp_path: Path
) -> None:
    plan = "no-memory@rank=0,step=3,phase=eval"
    settings = LEAST | {"checkpoint_every": 0, "log_every": 3, "faults": plan}
    spec = make_spec(text, tmp_path, **settings)
    (outcome,) = run_ranks(spec, 1)
    assert outcome["error"] == "MemoryExhausted", outcome
    assert "in eval of step 3" in outcome["message"]
    assert "Saved at step 3; then resume" in outcome["message"]
    assert [*series(spec)] == [1, 3], "the loss of the step that was saved"


def test_an_update_is_not_done_again(text: Path, tmp_path: Path) -> None:
    """Memory that runs out before the commit point is a step to repeat; within the update it is not:
    the rank ends, and the others save what they have.
    """
    plan = "no-memory@rank=0,step=2,phase=optimizer;no-memory@rank=0,step=3,phase=committed"
    spec = make_spec(text, tmp_path, **RECIPE | {"faults": plan, "global_batch_size": 48})
    outcome = run_elastic(spec, 2)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert [event["limit"] for event in shortages(spec)] == [6, 3]

    spec = make_spec(text, tmp_path / "update", **RECIPE)
    (failed,) = run_ranks(spec, 1, first=_no_memory_for_the_update)
    assert failed["error"] == "ConfigError"
    assert "in the update of step 1" in failed["message"]
    assert "--activation_checkpointing" in failed["message"]


def _no_memory_for_the_update() -> None:
    """Let torch's optimizer raise as it does where a GPU has no room for its state."""

    def step(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    torch.optim.SGD.step = step  # type: ignore[method-assign]


# What a restart and a later command begin with.


# A script's own model.


def own_model(
    tmp_path: Path, data: Callable[[], Any], validation: Any = None, **config: Any
) -> list[float]:
    """Train a small model of a script in this process; return the losses of the steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "out_dir": str(tmp_path),
        "max_steps": 6,
        "log_every": 1,
        "checkpoint_every": 0,
        "grad_clip": 0.0,
        "device": "cpu",
        "precision": "fp32",
        "tensorboard": False,
    }
    engine = RuntimeEngine(model, optimizer, settings | config, loss_fn=nn.MSELoss())
    engine.fit(data(), validation)
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    return [json.loads(line)["train/loss"] for line in metrics.read_text().splitlines()]


def _samples() -> TensorDataset:
    """20 samples: the last batch of 8 in an epoch has four."""
    source = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(20, 6, generator=source), torch.randn(20, 1, generator=source))


def _loader() -> DataLoader[Any]:
    return DataLoader(_samples(), batch_size=8, shuffle=True)


@pytest.mark.parametrize("data", [_samples, _loader])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_scripts_samples_are_read_again_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, error: type[Exception]
) -> None:
    """The forward of step 3 fails: of an epoch's last, short batch. What its frames kept is freed."""
    size = {"micro_batch_size": 8} if data is _samples else {}
    clean = own_model(tmp_path / "clean", data, **size)
    calls, forward = Counter[int](), nn.MSELoss.forward
    kept: list[weakref.ref[Tensor]] = []

    def full(self: nn.MSELoss, output: Tensor, target: Tensor) -> Tensor:
        calls[len(output)] += 1
        assert not [ref for ref in kept if ref() is not None]
        if calls.total() == 6:
            of_this_frame = output * 2
            kept.append(weakref.ref(of_this_frame))
            raise error("no memory")
        return forward(self, output, target)

    monkeypatch.setattr(nn.MSELoss, "forward", full)
    assert own_model(tmp_path / "faulty", data, **size) == pytest.approx(clean, abs=ROUNDING)
    assert calls[4] > 4, "half of eight"
    assert kept


def test_batches_of_the_script_are_not_cut(tmp_path: Path) -> None:
    """An iterable yields batches: what half of one is, only the script knows."""

    class Stream:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return ((torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3))

    plan = "no-memory@rank=0,step=3,phase=backward"
    match = "the train data come in batches of 8; give smaller ones.* Saved at step 2"
    with pytest.raises(MemoryExhausted, match=match):
        own_model(tmp_path, Stream, faults=plan)


class Hungry(Dataset[Any]):
    """Samples of which one takes more memory than there is, from some read on."""

    def __init__(self, error: Exception, reads: int) -> None:
        self._error = error
        self._reads = reads

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._reads -= 1
        if self._reads < 0:
            raise self._error
        return torch.full((6,), index / 64), torch.zeros(1)


def hungry_stream(error: Exception) -> Iterator[Any]:
    yield torch.ones(8, 6), torch.zeros(8, 1)
    raise error


class HungryStream:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        return hungry_stream(self._error)


def hungry_loader(error: Exception, workers: int = 0, reads: int = 0) -> DataLoader[Any]:
    return DataLoader(Hungry(error, reads), batch_size=8, num_workers=workers)


# How data run out of memory, and the step after which; 0: before the first one
HUNGRY: dict[str, tuple[Callable[[Exception], Any], int]] = {
    "a later item": (lambda error: Hungry(error, 40), 3),
    "a worker": (lambda error: hungry_loader(error, 1), 0),
    # it has its own count
    "an iterable": (HungryStream, 1),
}
MEMORY_OF_THE_HOST = MemoryError("Unable to allocate 3.00 GiB for an array")
OF_TORCH = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
OF_A_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    "error", [MEMORY_OF_THE_HOST, OF_TORCH, OF_A_GPU], ids=["host", "torch", "GPU"]
)
@pytest.mark.parametrize("place", HUNGRY)
def test_memory_that_runs_out_while_data_are_read_is_not_that_of_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, error: Exception
) -> None:
    """Half the micro batch, which a forward or a backward wants, would not help a dataset."""
    make, after = HUNGRY[place]
    size = {"micro_batch_size": 8} if "item" in place else {}
    with pytest.raises((DataError, DataFailed)) as raised:
        own_model(tmp_path, partial(make, error), **size)
    message = str(raised.value)
    assert str(error)[:20] in message
    assert "halve" not in message
    assert "memory  " not in capsys.readouterr().out, "no smaller micro batch was tried"
    begins = (
        f"after step {after} rank 0 could not" if after else "rank 0 cannot read its first batch"
    )
    assert message.startswith(begins)
