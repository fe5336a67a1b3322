"""What a checkpoint keeps of a script's model: every tensor and extra state, in every mode.

The right values are those of a plain loop in one process. A table of modules (harness/keepers.py)
goes through all modes on ranks that stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.cli.checkpoint import main as checkpoint
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.machine.tensor_memory import bytes_of
from nanoray.script.data.source import ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness import script_runs
from tests.harness.elastic import run_elastic
from tests.harness.keepers import KEEPERS
from tests.harness.lasting_ranks import LastingRanks

STEPS = 6
SETTINGS = script_runs.SETTINGS | {"max_steps": STEPS, "eval_every": 2, "hash_every": 1}
MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")


def points() -> TensorDataset:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def make(kind: str, seed: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = KEEPERS[kind]()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def fit(run: Run, kind: str) -> None:
    # Every rank begins with other weights: rank 0's hold for all.
    model, optimizer = make(kind, seed=5 + run.rank)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(), points())


def plain(kind: str) -> nn.Module:
    """Return the module that a loop of plain torch trains on the same samples."""
    model, optimizer = make(kind)
    data = ScriptData(points(), None, 1337, 12, torch.device("cpu"))
    for step in range(STEPS):
        x, y = data.train_batch(12 * step, 12)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def a_spec(folder: Path, **settings: Any) -> RunSpec:
    config = make_config(DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings)
    return open_run(config, script_data(), time.time())


def trained(ranks: LastingRanks, folder: Path, kind: str, **settings: Any) -> RunSpec:
    spec = a_spec(folder, **settings)
    outcomes = ranks.train(spec, Program(partial(fit, kind=kind), frozenset(settings)))
    errors = [outcome for outcome in outcomes if "error" in outcome]
    assert not errors, errors[0]["traceback"]
    return spec


def saved(spec: RunSpec) -> StateDict:
    found, damaged = newest_valid(spec.checkpoints)
    assert found
    assert not damaged
    return found.state


def require_equal(ours: StateDict, theirs: StateDict) -> None:
    """Compare two checkpoints to the bit."""
    assert ours.model.keys() == theirs.model.keys()
    for name, tensor in theirs.model.items():
        assert ours.model[name].dtype == tensor.dtype, name
        assert ours.model[name].shape == tensor.shape, name
        assert torch.equal(bytes_of(ours.model[name]), bytes_of(tensor)), name
    for name, tensor in theirs.optimizer.items():
        assert torch.equal(ours.optimizer[name], tensor), name
    assert ours.meta["entries"] == theirs.meta["entries"]
    assert ours.meta["listing"] == theirs.meta["listing"]


def exported(spec: RunSpec, kind: str) -> nn.Module:
    """Return a plain module with what `export` wrote, after `verify` has found all of it."""
    assert checkpoint(["verify", str(spec.folder)]) == 0
    out = spec.folder / f"{time.monotonic_ns()}.pt"
    assert checkpoint(["export", str(spec.folder), "--out", str(out)]) == 0
    model, _ = make(kind, seed=99)
    state = torch.load(out, weights_only=True)
    if kind == "assorted":  # torch does not write into an expanded tensor
        model.expanded = model.expanded.clone()
    model.load_state_dict(state, strict=True)
    return model


def require_alike(model: nn.Module, right: nn.Module, kind: str, world: int) -> None:
    """Compare a trained module with the one of a plain loop: to the bit where nothing is trained."""
    parameters = right.named_parameters(remove_duplicate=False)
    # A forward uses the statistics of its own rank.
    near = 0.1 if kind in ("moving", "normed") else 1e-3
    trained_names = {name for name, p in parameters if p.requires_grad}
    theirs = right.state_dict()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            # A rank's own counters are those of one process: a forward for each step.
            assert value["batches"] == theirs[name]["batches"] == STEPS
            assert value["names"] == ["a", ("b", None, True)]
            assert torch.equal(value["history"][0], theirs[name]["history"][0])
            continue
        if name in trained_names or kind == "normed":
            found = value.float().reshape(-1)  # pytest takes no single number as a tensor
            assert found == pytest.approx(theirs[name].float().reshape(-1), abs=near), name
        elif kind in ("assorted", "extra states") or not value.is_floating_point():
            assert torch.equal(bytes_of(value), bytes_of(theirs[name])), name


@pytest.fixture(scope="module")
def two() -> Iterator[LastingRanks]:
    with LastingRanks(2) as ranks:
        yield ranks


def kinds_in_modes() -> list[Any]:
    """Every kind in every mode; without `full`, those with most to keep in one."""
    cases = []
    for kind in ("assorted", "extra states", "moving", "normed"):
        for mode in MODES:
            is_short = mode == "fsdp" and kind in ("assorted", "moving")
            cases.append(pytest.param(kind, mode, marks=() if is_short else pytest.mark.full))
    return cases


@pytest.mark.parametrize(("kind", "mode"), kinds_in_modes())
def test_a_resume_keeps_every_bit_in_every_mode(
    tmp_path: Path, two: LastingRanks, kind: str, mode: str
) -> None:
    whole = trained(two, tmp_path / "whole", kind, dp_mode=mode)
    first = trained(two, tmp_path / "parts", kind, dp_mode=mode, stop_at=3)
    rest = trained(two, tmp_path / "parts", kind, dp_mode=mode, resume="auto")
    assert rest.folder == first.folder
    require_equal(saved(rest), saved(whole))
    require_alike(exported(whole, kind), plain(kind), kind, 2)


def test_one_process_is_a_plain_loop_to_the_bit(tmp_path: Path) -> None:
    """The warm-up and evaluations count as no forward."""
    with LastingRanks(1) as alone:
        for kind in ("assorted", "extra states", "moving"):
            right = plain(kind).state_dict()
            found = exported(trained(alone, tmp_path / kind, kind), kind).state_dict()
            assert found.keys() == right.keys()
            for name, value in found.items():
                if isinstance(value, Tensor):
                    assert torch.equal(bytes_of(value), bytes_of(right[name])), (kind, name)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "assorted",
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in ("extra states", "moving", "normed")
        ),
    ],
)
def test_a_run_goes_on_in_any_mode_at_any_number_of_ranks(
    tmp_path: Path, two: LastingRanks, kind: str
) -> None:
    with LastingRanks(3) as three, LastingRanks(1) as alone:
        trained(three, tmp_path, kind, dp_mode="fsdp", stop_at=1)
        trained(two, tmp_path, kind, dp_mode="zero1", stop_at=2, resume="auto")
        trained(alone, tmp_path, kind, dp_mode="ddp", stop_at=3, resume="auto")
        trained(two, tmp_path, kind, dp_mode="fsdp", stop_at=4, resume="auto")
        trained(two, tmp_path, kind, dp_mode="ddp_by_hand", stop_at=5, resume="auto")
        last = trained(three, tmp_path, kind, dp_mode="zero2", resume="auto")
    require_alike(exported(last, kind), plain(kind), kind, 3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("assorted", "fsdp"),
        *(
            pytest.param(kind, mode, marks=pytest.mark.full)
            for kind, mode in (
                ("moving", "ddp"),
                ("assorted", "zero1"),
                ("extra states", "fsdp"),
                ("extra states", "ddp_by_hand"),
                ("moving", "fsdp"),
            )
        ),
    ],
)
def test_a_replacement_receives_all_of_it(tmp_path: Path, kind: str, mode: str) -> None:
    """Rank 0 is lost in a backward: the others undo that step's forwards, and repeat it."""
    settings = {"dp_mode": mode}
    program = Program(partial(fit, kind=kind), frozenset(settings))
    whole = a_spec(tmp_path / "whole", **settings)
    run_elastic(whole, 2, train=program)
    faults = "kill@rank=0,step=3,phase=backward;kill@rank=1,step=5"
    spec = a_spec(tmp_path / "faults", faults=faults, **settings)
    outcome = run_elastic(spec, 2, train=program)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 2
    require_equal(saved(spec), saved(whole))


def test_a_roll_back_restores_all_of_it(tmp_path: Path, two: LastingRanks) -> None:
    """The forwards of the bad step count for nothing, nor do those that explain it."""
    settings = {"on_nan": "rollback", "checkpoint_every": 2, "checkpoint_mode": "sync"}
    for kind in ("moving", "extra states"):
        spec = trained(two, tmp_path / kind, kind, faults="nan@rank=1,step=4", **settings)
        model = exported(spec, kind)
        if kind == "moving":
            assert model.batches == STEPS
        else:
            assert model[0].notes["batches"] == STEPS


def test_a_buffer_of_a_model_that_had_none_is_refused_in_its_first_step(
    tmp_path: Path, two: LastingRanks
) -> None:
    with LastingRanks(1) as alone:
        for ranks in (alone, two):
            program = Program(partial(fit, kind="late"), frozenset())
            for outcome in ranks.train(a_spec(tmp_path), program):
                assert outcome.get("error") == "ConfigError", outcome
                assert outcome["message"].startswith(
                    "a forward has changed the buffer seen from none to (2,) of torch.float32"
                )


def fit_passing(run: Run, folder: Path) -> None:
    model, optimizer = make("passing")
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(), points())
    torch.save(model.mean, folder / f"{run.rank}.pt")


def test_buffers_that_no_checkpoint_keeps_are_rank_0s_too(
    tmp_path: Path, two: LastingRanks
) -> None:
    """As in torch's DDP."""
    program = Program(partial(fit_passing, folder=tmp_path), frozenset())
    for outcome in two.train(a_spec(tmp_path), program):
        assert "error" not in outcome, outcome
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.abs().sum() > 0
    assert torch.equal(first, second)

    program = Program(partial(fit, kind="passing and growing"), frozenset())
    for outcome in two.train(a_spec(tmp_path), program):
        assert outcome.get("error") == "ConfigError", outcome
        assert "rank 1 has the buffer largest as" in outcome["message"]


def with_counter(run: Run, size: int) -> None:
    model, optimizer = make("moving")
    if size:
        model.register_buffer("count", torch.full((size,), 4))
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points())


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (1, 0, "count only in the checkpoint"),
        (0, 1, "count not in the checkpoint"),
        (1, 2, "count has the shape [1] there and [2] here"),
    ],
)
def test_a_resume_with_other_buffers_is_refused_where_ranks_cut_the_model(
    tmp_path: Path, two: LastingRanks, before: int, now: int, text: str
) -> None:
    """The listing of the checkpoint has buffers, too; no rank's pieces need have them."""
    settings = {"dp_mode": "fsdp", "stop_at": 2}
    program = Program(partial(with_counter, size=before), frozenset(settings))
    two.train(a_spec(tmp_path, **settings), program)
    program = Program(partial(with_counter, size=now), frozenset(settings))
    for outcome in two.train(a_spec(tmp_path, dp_mode="fsdp", resume="auto"), program):
        assert outcome.get("error") == "CheckpointError", outcome
        assert outcome["message"].startswith(f"the checkpoint is of another model: {text}")


class Thawing(nn.Sequential):
    """On one rank a frozen layer begins to train."""

    def __init__(self, rank: int) -> None:
        super().__init__(nn.Linear(3, 16), nn.Linear(16, 1))
        self.rank = rank
        self[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.rank == 1:
            self[0].requires_grad_(True)
        return super().forward(x)


def fit_thawing(run: Run) -> None:
    model = Thawing(run.rank)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.05)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points())


def test_a_parameter_that_begins_to_train_on_one_rank_ends_all_with_its_name(
    tmp_path: Path, two: LastingRanks
) -> None:
    for outcome in two.train(a_spec(tmp_path), Program(fit_thawing, frozenset())):
        assert outcome.get("error") == "ConfigError", outcome
        assert outcome["message"].startswith("0.weight had requires_grad = False when the run")


def with_more_trained(run: Run, first: bool) -> None:
    model, _ = make("assorted")
    model.base.requires_grad_(not first)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points())


def test_a_resume_with_other_weights_trained_is_refused(tmp_path: Path, two: LastingRanks) -> None:
    for mode in ("ddp", "fsdp"):
        folder = tmp_path / mode
        settings = {"dp_mode": mode, "stop_at": 2}
        program = Program(partial(with_more_trained, first=True), frozenset(settings))
        two.train(a_spec(folder, **settings), program)
        program = Program(partial(with_more_trained, first=False), frozenset(settings))
        outcomes = two.train(a_spec(folder, dp_mode=mode, resume="auto"), program)
        assert [outcome["error"] for outcome in outcomes] == ["CheckpointError"] * 2
        assert outcomes[0]["message"].startswith(
            "other weights were trained in the checkpoint: base.bias (frozen there, trained here) "
            "and 2 more; resume with the same ones, or begin a new run from the weights: nanoray"
        )
        program = Program(partial(fit, kind="normed"), frozenset())
        outcomes = two.train(a_spec(folder, dp_mode=mode, resume="auto"), program)
        assert outcomes[0]["error"] == "CheckpointError"
        # A sharded mode reads its pieces by name before the classes are compared.
        words = {
            "ddp": "but model is Assorted there and Sequential here",
            "fsdp": "; resume with the model that wrote it",
        }
        assert words[mode] in outcomes[0]["message"]
