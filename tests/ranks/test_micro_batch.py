"""`micro_batch_size auto` on real ranks: a run is, to the bit, the one that is given the found size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nanoray import RuntimeEngine
from nanoray.checkpoint.run import RunSpec, write_attempt
from nanoray.errors import ConfigError
from nanoray.tools.replay.__main__ import main as replay
from nanoray.train.micro_batch import FILE
from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, run_ranks, series

# Plain SGD without clipping: a constant factor on a gradient would show
RECIPE: dict[str, Any] = {
    "precision": "fp32",
    "optimizer": "sgd",
    "lr": 0.1,
    "grad_clip": 0.0,
    "max_steps": 3,
    "checkpoint_every": 3,
    "global_batch_size": 8,
    "hash_every": 0,
    "sample_tokens": 8,
}


def trained(spec: RunSpec, world: int, **how: Any) -> list[dict[str, Any]]:
    outcomes = run_ranks(spec, world, **how)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return outcomes


def auto(text: Path, folder: Path, **settings: Any) -> RunSpec:
    """Open a run that searches, with a cache of its own."""
    values = {"micro_batch_size": "auto", "data_dir": str(folder / "cache")}
    return make_spec(text, folder / "runs", **RECIPE | values | settings)


def limits(folder: Path) -> list[int]:
    """The micro batch of each group of ranks."""
    lines = map(json.loads, (folder / "hashes.jsonl").read_text().splitlines())
    return [line["limit"] for line in lines if "group" in line]


def measured(folder: Path) -> int:
    """How many times something was measured for the runs of a folder."""
    return len(json.loads((folder / "cache" / FILE).read_text()))


WAYS: list[Any] = [
    pytest.param(1, {}, id="one process", marks=pytest.mark.full),
    pytest.param(2, {"dropout": 0.1}, id="ddp dropout"),
    pytest.param(2, {"dp_mode": "zero2"}, id="zero2", marks=pytest.mark.full),
    pytest.param(2, {"dp_mode": "fsdp"}, id="fsdp", marks=pytest.mark.full),
    pytest.param(2, {"tp": 2}, id="tp", marks=pytest.mark.full),
    pytest.param(2, {"cp": 2}, id="cp", marks=pytest.mark.full),
    pytest.param(
        2,
        {"pp": 2, "pp_schedule": "interleaved", "n_layer": 4},
        id="pp 2x2",
        marks=pytest.mark.full,
    ),
    pytest.param(2, {"ep": 2, "experts": 4, "dp_mode": "zero1"}, id="ep", marks=pytest.mark.full),
    pytest.param(2, {"seq_warmup_steps": 2}, id="short sequences", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "settings"), WAYS)
def test_it_is_the_run_with_the_found_size(
    text: Path, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    """Whatever was tried before step 1 leaves no trace: weights, draws, data, files."""
    spec = auto(text, tmp_path, **settings)
    outcome, *_ = trained(spec, world)
    (found,) = limits(spec.folder)
    share = 8 if set(settings) & {"tp", "pp", "cp"} or world == 1 else 4
    assert found in [size for size in (1, 2, 4, 8) if size <= share]
    assert not (spec.folder / "arms").exists()
    assert measured(tmp_path) == 1

    given = make_spec(text, tmp_path / "given", **RECIPE | settings | {"micro_batch_size": found})
    same, *_ = trained(given, world)
    assert outcome["sample"] == same["sample"]
    assert series(spec) == series(given)
    assert equal(final(spec), final(given))
    config = json.loads((spec.folder / "config.json").read_text())
    assert (config["micro_batch_size"], config["micro_batch_search"]) == (0, True)


@pytest.mark.full
def test_a_second_start_and_a_resume_measure_nothing(text: Path, tmp_path: Path) -> None:
    """Another run takes what is in the cache, a resume what the run trained with; else it differs."""
    first = auto(text, tmp_path, max_steps=4, stop_at=2)
    trained(first, 1)
    (found,) = limits(first.folder)
    folder = first.folder
    del first  # a run is locked while it is open

    # What is in the cache is taken as it is, whatever a measurement would say.
    cache = tmp_path / "cache" / FILE
    ((key, entry),) = json.loads(cache.read_text()).items()
    assert entry["micro"] == found
    other = 2 if found != 2 else 4
    cache.write_text(json.dumps({key: entry | {"micro": other}}))
    second = auto(text, tmp_path, lr=0.05)
    trained(second, 1)
    assert limits(second.folder) == [other]

    resumed = auto(text, tmp_path, max_steps=4, resume=str(folder))
    trained(resumed, 1)
    assert limits(resumed.folder) == [found, found]

    # Another model is another measurement.
    third = auto(text, tmp_path, n_embd=16)
    trained(third, 1)
    assert measured(tmp_path) == 2


@pytest.mark.full
@pytest.mark.parametrize("how", [[], ["--processes"]])
def test_a_replay_has_the_found_size(text: Path, tmp_path: Path, how: list[str]) -> None:
    spec = auto(text, tmp_path, hash_every=1)
    trained(spec, 1)
    assert replay([str(spec.folder), "--step", "2", *how]) == 0


# A lack of memory while sizes are measured.


def _little_memory() -> None:
    """Let rank 1, or a rank alone, run out of memory with more than two sequences."""
    from nanoray.parallel.plan import Plan

    forward_backward = Plan.forward_backward

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan: Any = self
        if plan._mesh.rank == plan._mesh.world_size - 1 and plan._accum * 2 < 8 // plan.data.size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward_backward(self, *args, **kwargs)

    Plan.forward_backward = full  # type: ignore[method-assign]


def test_a_rank_alone_goes_on_with_what_has_fitted(text: Path, tmp_path: Path) -> None:
    spec = auto(text, tmp_path)
    trained(spec, 1, first=_little_memory)
    (found,) = limits(spec.folder)
    assert found in (1, 2)
    given = make_spec(text, tmp_path / "given", **RECIPE | {"micro_batch_size": found})
    trained(given, 1)
    assert series(spec) == series(given)


@pytest.mark.full
def test_ranks_begin_again_below_what_did_not_fit(text: Path, tmp_path: Path) -> None:
    """The others wait for the rank in a collective: all end, and a restart tries smaller ones."""
    spec = auto(text, tmp_path)
    # In a test the process of a rank that has failed lives on, so the other waits for this long
    soon = spec.config.model_copy(update={"timeout_s": 5.0})
    outcomes = run_ranks(replace(spec, config=soon), 2, first=_little_memory)
    assert outcomes[1]["error"] == "OutOfMemory"
    assert (
        "while micro batches of 4 were measured; after a restart at most 2"
        in (outcomes[1]["message"])
    )
    again = spec.next_attempt()
    write_attempt(again)
    trained(again, 2)
    assert limits(spec.folder)[-1] in (1, 2)
    (entry,) = json.loads((tmp_path / "cache" / FILE).read_text()).values()
    assert " 4:" not in entry["why"], "it was tried again"


def _no_memory() -> None:
    from nanoray.parallel.plan import Plan

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    Plan.forward_backward = full  # type: ignore[method-assign]


def test_where_the_smallest_does_not_fit_the_remedies_are_named(text: Path, tmp_path: Path) -> None:
    (outcome,) = run_ranks(auto(text, tmp_path), 1, first=_no_memory)
    assert outcome["error"] == "ConfigError"
    assert "while micro batches of 1 were measured" in outcome["message"]
    assert "--activation_checkpointing" in outcome["message"]


# A script's own model.

INPUTS = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Two layers, and others between them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def samples() -> TensorDataset:
    return TensorDataset(INPUTS, torch.arange(20) % 3)


def fit(
    folder: Path, *layers: nn.Module, loss_fn: Any = None, data: Any = None, **config: Any
) -> tuple[list[float], Model, torch.optim.Optimizer]:
    """Train a script's model in this process; return the losses, the model and the optimizer."""
    torch.manual_seed(1)
    model = Model(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {
        "out_dir": str(folder / "runs"),
        "data_dir": str(folder / "cache"),
        "max_steps": 4,
        "log_every": 1,
        "checkpoint_every": 0,
        "device": "cpu",
        "precision": "fp32",
        "tensorboard": False,
        "global_batch_size": 8,
        "micro_batch_size": "auto",
    }
    engine = RuntimeEngine(
        model, optimizer, settings | config, loss_fn=loss_fn or nn.CrossEntropyLoss()
    )
    engine.fit(data if data is not None else samples())
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    lines = metrics.read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines], model, optimizer


@pytest.mark.parametrize(
    "layers", [pytest.param((nn.Tanh(),), marks=pytest.mark.full), (nn.Dropout(0.2),)]
)
def test_a_scripts_model_is_copied_and_left_alone(
    tmp_path: Path, layers: tuple[nn.Module, ...]
) -> None:
    """Its optimizer's hooks are not called, and its weights are those of a run without a search.

    Of a model that draws, two forwards of a sample differ, which says nothing of its loss.
    """
    hooked: list[int] = []

    class Hooked(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_step_post_hook(lambda *_: hooked.append(1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Hooked)
        losses, model, optimizer = fit(tmp_path / "auto", *layers)
        assert len(hooked) == 4, "once per step of the run"
        (folder,) = tmp_path.glob("auto/runs/*")
        (found,) = limits(folder)
        same, other, others = fit(tmp_path / "given", *layers, micro_batch_size=found)
    assert losses == same
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for mine, theirs in zip(optimizer.state.values(), others.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """A loss over the batch, as CLIP's: each sample against the others."""
    output = nn.functional.normalize(output)
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


LOADER = DataLoader(samples(), batch_size=8)


class Stream:
    """An iterable of batches."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(8, 6), torch.zeros(8, dtype=torch.long)) for _ in range(9))


@pytest.mark.parametrize(
    ("layers", "given", "message"),
    [
        ([], {"loss_fn": contrast}, "the loss of two samples is not the mean of their own"),
        ([nn.BatchNorm1d(16)], {}, "batch norms take mean and variance of a micro batch"),
        ([], {"data": Stream()}, "auto, but the train data come in batches of 8"),
        ([], {"data": LOADER}, "auto, but the train data come in batches of 8"),
    ],
)
def test_what_the_micro_batch_decides_is_refused(
    tmp_path: Path, layers: list[nn.Module], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        fit(tmp_path, *layers, **given)
    assert "\n" not in str(error.value)
