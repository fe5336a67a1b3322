"""The trial before step 1: mistakes of a script are refused in one line, and nothing is changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.run import RunSpec
from nanoray.config import make_config
from nanoray.data.dataset import own_data
from nanoray.errors import ConfigError
from nanoray.own.program import Program
from nanoray.own.run import Run
from nanoray.own.settings import DEFAULTS
from nanoray.own.task import copied
from nanoray.own.trial import notes_on_hooks
from nanoray.own.untouched import untouched
from nanoray.start.folder import open_run
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.messages import find_line
from tests.harness.ranks import series
from tests.harness.wrong_inputs import WRONG, fit, inputs, network, not_a_number

SETTINGS = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "log_every": 1,
    "max_steps": 4,
    "tensorboard": False,
    "checkpoint_every": 0,
    "eval_every": 0,
    "timeout_s": 20,
    "init_timeout_s": 20,
}
Ranks = Callable[[int], LastingRanks]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """So many ranks, started at their first use."""
    started: dict[int, LastingRanks] = {}
    with ExitStack() as stack:

        def ranks_of(world: int) -> LastingRanks:
            if world not in started:
                started[world] = stack.enter_context(LastingRanks(world))
            return started[world]

        yield ranks_of


def opened(folder: Path, **settings: Any) -> RunSpec:
    config = make_config(DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings)
    return open_run(config, own_data(), 0.0)


CASES = [(name, world) for name, case in WRONG.items() for world in case.worlds]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_a_mistake_is_refused_in_one_line_on_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str, world: int
) -> None:
    """With what, why and what to do; the script's own traceback may follow."""
    case = WRONG[name]
    spec = opened(tmp_path, **case.settings)
    outcomes = ranks(world).train(spec, Program(case.program, frozenset(case.settings)))
    messages = {outcome.get("message", "") for outcome in outcomes}
    assert {outcome.get("error") for outcome in outcomes} <= {"ConfigError", "DataError"}, outcomes
    assert len(messages) == 1, "the same line on all ranks"
    (message,) = messages
    line, _, frames = message.partition("\n")
    assert ";" in line, "a remedy"
    wrapped = "failed before step 1: " in line or line.startswith("out of memory: ")
    assert wrapped == case.loud, "one wrapper shows what raises by itself"
    # The frames that follow are the script's alone.
    assert frames.count("  File ") == frames.count("wrong_inputs.py"), message
    place = 0
    for word in case.words:
        assert word in message[place:], f"no {word!r} in {message!r} after {place}"
        place = message.index(word, place) + len(word)
    assert not (spec.folder / "metrics.jsonl").exists() or not series(spec), "no step was done"


def test_a_loss_that_is_not_finite_is_left_to_the_guards(ranks: Ranks, tmp_path: Path) -> None:
    """They name the layer and the samples, and a run may leave such a step out (on_nan)."""
    program = partial(fit, loss_fn=not_a_number)
    (outcome,) = ranks(1).train(opened(tmp_path / "stop"), Program(program, frozenset()))
    assert outcome["error"] == "TrainingDiverged", outcome
    find_line(outcome["message"], "at step 1 the loss is nan", "samples 0 to 11")


# --- the trial changes nothing ---


class Restless(nn.Module):
    """A forward that changes all that is put back after the trial."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("emptied", torch.zeros(2))
        self.register_buffer("grows", torch.zeros(1))
        self.drop = nn.Dropout(0.5)
        self.notes: dict[str, int] = {}
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(1)
        self.numpys = np.random.default_rng(1)
        self.older = np.random.RandomState(1)

    def get_extra_state(self) -> Any:
        return {"notes": dict(self.notes)}

    def set_extra_state(self, state: Any) -> None:
        self.notes = dict(state["notes"])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(1.5)
            self.frozen.data = self.frozen.data * 0.5
            self.counted += 1
            self.unsaved.add_(1)
            self.replaced = self.replaced + 1
            self.emptied = None
            self.grows = torch.cat([self.grows, x[:1, 0]])
        self.register_buffer("late", torch.ones(1))
        self.notes["seen"] = self.notes.get("seen", 0) + 1
        noise = torch.randn(()) + np.random.rand() + random.random()
        noise = noise + torch.randn((), generator=self.torchs) + self.pythons.random()
        return self.drop(self.layer(x)) + noise + self.numpys.random() + self.older.rand()


def facts(model: Any) -> dict[str, Any]:
    """Return what a forward of Restless changes, and the random generators."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone().tolist() for name, tensor in tensors.items()}
    generators = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
    own = (
        model.torchs.get_state().tolist(),
        model.pythons.getstate(),
        model.numpys.bit_generator.state,
        str(model.older.get_state()),
    )
    return {
        "values": values,
        "extra states": dict(model.notes),
        "generators": generators,
        "own generators": own,
        "modes": [module.training for module in model.modules()],
        "saved": sorted(model.state_dict()),
        "gradients": [p.grad for p in model.parameters()],
    }


def test_a_model_is_afterwards_as_it_was() -> None:
    model = Restless()
    model.drop.eval()
    before = facts(model)
    with untouched(model, torch.device("cpu")) as traces:
        loss = model(inputs()).mean()
        loss.backward()
        model.eval()
        changed = facts(model)
    assert facts(model) == before
    assert traces.written == ["frozen", "layer.weight"]
    assert traces.drawn == ["torchs", "pythons", "numpys", "older"]
    # The forward has changed each of them; without that the comparison would show nothing.
    assert all(changed[kind] != before[kind] for kind in before)
    for name, value in before["values"].items():
        assert name == "layer.bias" or changed["values"].get(name) != value, name


def test_a_warning_of_torch_becomes_a_note(ranks: Ranks, tmp_path: Path) -> None:
    """A loss that broadcasts its targets is allowed, and seldom meant."""
    spec = opened(tmp_path)
    x = inputs()
    data = torch.utils.data.TensorDataset(x, x.sum(1))  # (B,) and not (B, 1)
    (outcome,) = ranks(1).train(spec, Program(partial(fit, data=data), frozenset()))
    assert "error" not in outcome, outcome
    line = find_line(spec.log(0).read_text(), "note    the first batch warns", "broadcasting")
    assert "target size" in line


def test_hooks_on_gradients_are_named() -> None:
    """On several ranks they see a part of the gradient."""
    model = network()
    assert notes_on_hooks(model) == []
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[index]
    (note,) = notes_on_hooks(model)
    assert find_line(note, "the gradient hook of 2.weight", "rank's part of the gradient")


# --- lazy modules ---


def lazy(run: Run, explicit: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))
    if explicit:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    fit(run, model)


@pytest.mark.parametrize("world", [1, 2])
def test_lazy_modules_train_as_others_do(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """They draw the same first weights, in the order of the forward, and resume."""
    losses = []
    for explicit in (False, True):
        spec = opened(tmp_path / str(explicit), dp_mode="zero1")
        outcomes = ranks(world).train(spec, Program(partial(lazy, explicit=explicit), frozenset()))
        assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
        losses.append(series(spec))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_a_model_that_cannot_be_copied_is_refused_where_a_copy_is_needed() -> None:
    model = network()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"copy.deepcopy of Sequential failed before.*; keep what cannot"
    ):
        copied(model)
