"""A script's own model, optimizer and data in nanoray's loop: resumed to the bit, on any ranks, in
every mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanoray
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.errors import DataError
from nanoray.script.data.source import ScriptData
from nanoray.script.data.stream import KEPT, Stream
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness import script_runs
from tests.harness.commands import run, torchrun
from tests.harness.elastic import run_elastic
from tests.harness.ranks import records, run_ranks, series
from tests.harness.script_runs import final_tensors

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Two of each rank would wait for each other on two cores
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
CPU = torch.device("cpu")
SETTINGS = script_runs.SETTINGS | {"max_steps": 8, "eval_every": 4}


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


class Batched:
    """An iterable of batches that can be iterated again."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        x, y = points(40, 1).tensors
        return iter(
            [
                (x[i : i + self.size], y[i : i + self.size])
                for i in range(0, 40 - self.size + 1, self.size)
            ]
        )


def with_batch_norm(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(50, 1), points(20, 2))


def fit(run: Run, how: str = "dataset", steps: int | None = None) -> None:
    """What a script does: a model, two groups of parameters with rates of their own, an optimizer,
    data.
    """
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "lr": 0.005},
    ]
    kind = getattr(torch.optim, how, torch.optim.AdamW)
    optimizer = kind(groups) if kind.__name__ == how else kind(groups, fused=how != "not fused")
    data: Any = points(50, 1)
    if how == "loader":
        data = DataLoader(data, batch_size=2, shuffle=True)
    if how == "batches":
        data = Batched(run.config.global_batch_size // run.world_size)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data, points(20, 2), steps)


def open_own(folder: Path, **settings: Any) -> RunSpec:
    return open_run(
        make_config(DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings),
        script_data(),
        time.time(),
    )


def trained(
    folder: Path, world: int, main: Callable[[Run], None] = fit, **settings: Any
) -> RunSpec:
    spec = open_own(folder, **settings)
    outcomes = run_ranks(spec, world, train=Program(main, frozenset(settings)))
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


def alone() -> dict[int, float]:
    """The losses of a plain loop over the same samples."""
    torch.manual_seed(1337)
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "lr": 0.005},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    data, losses = ScriptData(points(50, 1), None, 1337, 12, CPU), {}
    for step in range(8):
        x, y = data.train_batch(12 * step, 12)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    return losses


def test_a_script_trains_as_a_plain_loop_does_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Each group keeps its own rate, and an epoch ends in the middle of a step."""
    expected = alone()
    assert series(trained(tmp_path / "one", 1)) == expected, "to the bit"
    for world in (2, 3):
        assert series(trained(tmp_path / str(world), world)) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(  # test_own_kept resumes in all modes
    "mode", [*(pytest.param(mode, marks=pytest.mark.full) for mode in ("ddp", "zero1")), "fsdp"]
)
def test_it_resumes_to_the_bit_in_every_mode(tmp_path: Path, mode: str) -> None:
    """In the middle of an epoch."""
    whole = trained(tmp_path / "whole", 2, dp_mode=mode)
    first = trained(tmp_path / "parts", 2, dp_mode=mode, stop_at=3)
    rest = trained(tmp_path / "parts", 2, dp_mode=mode, resume="auto")
    assert rest.folder == first.folder
    assert series(rest) == series(whole)
    ours, theirs = final_tensors(rest), final_tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.full
def test_with_fsdp_each_group_cuts_a_copy_of_the_scripts_model(tmp_path: Path) -> None:
    """A rank is lost twice, and no bit differs: neither of the weights nor of the running
    statistics.
    """
    settings: dict[str, Any] = {"dp_mode": "fsdp", "checkpoint_every": 4}
    whole = trained(tmp_path / "whole", 2, with_batch_norm, **settings)
    spec = open_own(
        tmp_path / "faults",
        faults="kill@rank=0,step=3;kill@rank=1,step=6,phase=backward",
        **settings,
    )
    outcome = run_elastic(spec, 2, train=Program(with_batch_norm, frozenset(settings)))
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 2
    assert series(spec) == series(whole)
    ours, theirs = final_tensors(spec), final_tensors(whole)
    assert [name for name in theirs if "running_mean" in name]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_optimizer_that_is_not_fused_leaves_a_bad_step_out(tmp_path: Path) -> None:
    main = partial(fit, how="not fused")
    spec = trained(tmp_path, 1, main, on_nan="skip", faults="nan@rank=0,step=3")
    assert records(spec)[-1]["fault/skipped_steps"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in final_tensors(spec).values())


@pytest.mark.full
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_torchs_batch_norm_has_equal_statistics_on_all_ranks(tmp_path: Path, world: int) -> None:
    """They are compared with the weights at every step, and a resume goes on with them."""
    settings = {"hash_every": 1, "global_batch_size": 24}
    whole = trained(tmp_path / "whole", world, with_batch_norm, **settings)
    trained(tmp_path / "parts", world, with_batch_norm, stop_at=3, **settings)
    rest = trained(tmp_path / "parts", world, with_batch_norm, resume="auto", **settings)
    assert series(rest) == series(whole)
    ours, theirs = final_tensors(rest), final_tensors(whole)
    assert (theirs["1.running_mean"] != 0).all()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Heard(nanoray.Callback):
    """Writes down what it hears, and fails once in the middle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *words: Any) -> None:
        with self.path.open("a") as stream:
            stream.write(" ".join(map(str, words)) + "\n")

    def on_run_start(self, run: Run) -> None:
        self.write("start", run.world_size)

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        self.write("step", step)
        if step == 2:
            raise RuntimeError("a broken callback")

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        self.write("eval", step, "val/loss" in record)

    def on_checkpoint(self, step: int) -> None:
        self.write("saved", step)

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        self.write("end", outcome["exit_reason"])


def watched(run: Run, path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, [Heard(path)])
    engine.fit(points(50, 1), points(20, 2))


def test_callbacks_hear_in_order_and_a_broken_one_costs_nothing(tmp_path: Path) -> None:
    main = partial(watched, path=tmp_path / "heard")
    trained(tmp_path / "runs", 2, main, max_steps=4, checkpoint_mode="sync", checkpoint_every=2)
    assert (tmp_path / "heard").read_text().splitlines() == [
        *(
            "start 2",
            "step 1",
            "step 2",
            "saved 2",
            "step 3",
            "step 4",
            "eval 4 True",
            "saved 4",
            "end finished",
        ),
    ]


def refused(main: Callable[[Run], Any], folder: Path) -> str:
    (outcome,) = run_ranks(open_own(folder), 1, train=Program(main, frozenset()))
    return f"{outcome['error']}: {outcome['message']}"


def fits_twice(run: Run) -> None:
    fit(run)
    fit(run)


def of_another_model(run: Run) -> None:
    RuntimeEngine(network(), torch.optim.SGD(network().parameters(), lr=0.1), run)


def of_half_a_model(run: Run) -> None:
    model = network()
    RuntimeEngine(model, torch.optim.SGD(model[0].parameters(), lr=0.1), run)


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (fits_twice, "ConfigError: fit was called twice in one run; launch a run for each of them"),
        (
            of_another_model,
            "ConfigError: the optimizer has a parameter of shape (16, 3) that is not the model's; "
            "make",
        ),
        (
            of_half_a_model,
            "ConfigError: the optimizer does not update 2.weight; give it all parameters, or set "
            "requir",
        ),
    ],
)
def test_scripts_that_cannot_train_are_told_why(
    tmp_path: Path, main: Callable[[Run], None], text: str
) -> None:
    assert refused(main, tmp_path).startswith(text)


def test_data_that_cannot_be_read_are_told_why() -> None:
    for data, text in (
        (
            iter([1]),
            "the train data can be iterated once only; give a class whose __iter__ begins anew",
        ),
        (3, "the train data are a int; give a dataset"),
        ([], "the train data are empty; give at least one sample"),
    ):
        with pytest.raises(DataError, match=text):
            ScriptData(data, None, 0, 2, CPU)
    with pytest.raises(
        DataError, match="a batch is a list of 3, but must be a pair of inputs and targets"
    ):
        ScriptData([(1, 2, 3)], None, 0, 1, CPU).train_batch(0, 1)


def test_batches_go_on_over_epochs_and_back_to_older_ones() -> None:
    batches = Stream(Batched(8), "train")
    firsts = [batches.batch(number)[0][0] for number in range(12)]
    assert torch.equal(firsts[0], firsts[5]), "five batches are an epoch"
    far = Stream(Batched(8), "train")
    assert torch.equal(far.batch(KEPT + 20)[0][0], firsts[(KEPT + 20) % 5])
    assert torch.equal(far.batch(2)[0][0], firsts[2]), "it begins again"


@pytest.mark.parametrize("name", ["1_loop", "2_evaluation", "3_checkpoint"])
def test_the_first_stages_run(tmp_path: Path, name: str) -> None:
    script = str(EXAMPLES / "zero_to_one" / f"{name}.py")
    outputs = [
        run(script, env=ONE_THREAD, cwd=tmp_path) for _ in range(2 if name == "3_checkpoint" else 1)
    ]
    assert [done.returncode for done in outputs] == [0] * len(outputs), outputs[-1].stderr
    assert float(outputs[-1].stdout.split("step 200  loss ")[1].split()[0]) < 0.3


@pytest.mark.parametrize(
    "name",
    [
        # These two import nothing of nanoray, and the third goes on from them.
        *(pytest.param(name, marks=pytest.mark.full) for name in ("4_ranks", "5_overlap")),
        "6_monitoring",
    ],
)
def test_the_stages_with_ranks_run(tmp_path: Path, name: str) -> None:
    """Two ranks of a shared batch learn what one rank does."""
    outputs = torchrun(
        2, str(EXAMPLES / "zero_to_one" / f"{name}.py"), env=ONE_THREAD, cwd=tmp_path
    )
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr
    assert float(outputs[0].stdout.split("step 200  loss ")[1].split()[0]) < 0.3


@pytest.mark.full
def test_a_model_of_ones_own_trains_under_torchrun(tmp_path: Path, forked: dict[str, str]) -> None:
    """Under the real one. The script goes on after its training, on every rank."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    source = (EXAMPLES / "own_model.py").read_text()
    end = 'print("went on as rank", os.environ["RANK"], flush=True)'
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n" + source.replace("raise SystemExit(", "code = (") + f"    {end}\n"
    )
    env = ONE_THREAD | forked
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=400, env=env
    )
    assert done.returncode == 0, done.stderr
    went_on = [line for line in done.stdout.splitlines() if line.startswith("went on")]
    assert sorted(went_on) == ["went on as rank 0", "went on as rank 1"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["val_loss"] < 0.3
