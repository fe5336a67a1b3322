"""Modules of the kinds that people train: in every mode and at any number of ranks as in plain torch.

Each is trained to half of its steps, resumed to the end, and compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.resume import newest_valid
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.script.data.source import ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.zoo import SKIPS
from tests.harness.zoo_packages import PACKAGES
from tests.harness.zoo_public import MODES, PUBLIC, Kind

CPU = torch.device("cpu")
TOO_SMALL = "no element of this small model; use fewer ranks"
BATCH = 12
STEPS = 6
SEED = 1337
SETTINGS: dict[str, Any] = {
    "global_batch_size": BATCH,
    "micro_batch_size": 0,
    "max_steps": STEPS,
    "log_every": 3,
    "hash_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "precision": "fp32",
    "timeout_s": 20,
    "init_timeout_s": 20,
}
BY_NAME = {exhibit.name: exhibit for exhibit in (*PUBLIC, *PACKAGES)}


def train(run: Run, name: str) -> None:
    exhibit = BY_NAME[name]
    model = exhibit.model()
    engine = RuntimeEngine(model, exhibit.optimizers(model), run, exhibit.loss)
    engine.fit(exhibit.dataset())


def put_buffers(model: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.data.copy_(value)


@cache
def alone(name: str, pieces: int) -> dict[str, Tensor]:
    """Train in this process, with plain torch; return the weights and buffers.

    A step's batch is computed in so many pieces, whose gradients are averaged: what a rank draws,
    normalises or compares is its own piece. As under torch's DDP, each piece begins with the same
    buffers, and those of the first one are kept.
    """
    exhibit = BY_NAME[name]
    model = exhibit.model()
    optimizers = exhibit.optimizers(model)
    data = ScriptData(exhibit.dataset(), None, SEED, BATCH, CPU)
    size = BATCH // pieces
    for step in range(STEPS):
        model.zero_grad()
        begin = [buffer.clone() for buffer in model.buffers()]
        of_first: list[Tensor] = []
        for piece in range(pieces):
            put_buffers(model, begin)
            inputs, targets = data.train_batch(step * BATCH + piece * size, size)
            seed_generators(derive_seed(SEED, step, 0, piece), CPU)
            with torch.compiler.set_stance("force_eager"):
                loss = exhibit.loss_of(model, inputs, targets)
            (loss / pieces).backward()
            of_first = of_first or [buffer.clone() for buffer in model.buffers()]
        put_buffers(model, of_first)
        for optimizer in optimizers:
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained(ranks: LastingRanks, world: int, kind: Kind, mode: str, folder: Path) -> list[str]:
    """Train half of the steps, resume, and compare; return what is wrong."""
    for stop_at in (STEPS // 2, 0):
        resume = "none" if stop_at else "auto"
        settings = {"dp_mode": mode, "stop_at": stop_at, "resume": resume, "out_dir": str(folder)}
        spec = open_run(make_config(DEFAULTS | SETTINGS | settings), script_data(), 0.0)
        outcomes = ranks.train(spec, Program(partial(train, name=kind.name), frozenset(settings)))
        failed = [outcome for outcome in outcomes if "error" in outcome]
        if mode in kind.refused:
            return refusal_lines(kind.refused[mode], outcomes)
        # A tiny model has too few rows for three ranks, and all of them say so.
        if failed and TOO_SMALL in failed[0]["message"]:
            return refusal_lines(TOO_SMALL, outcomes)
        if failed:
            return [f"{failed[0]['error']}: {failed[0]['message']}"]

    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    ours = newest.state.model
    expected = alone(kind.name, world if kind.apart else 1)
    return [*differences(kind, ours, expected, world)]


def refusal_lines(words: str, outcomes: list[dict[str, Any]]) -> list[str]:
    """Return a line for each rank that did not refuse with these words."""
    lines = []
    for rank, outcome in enumerate(outcomes):
        refused = outcome.get("error") in ("ConfigError", "DataError")
        if not refused or words not in outcome["message"]:
            lines.append(f"rank {rank} did not refuse with {words!r}: {outcome}")
    return lines


def differences(
    kind: Kind, ours: dict[str, Tensor], expected: dict[str, Tensor], world: int
) -> Iterator[str]:
    """Yield a line for each tensor that is far from plain torch's, or missing."""
    for name, theirs in expected.items():
        # Running statistics are means over the ranks, and count no batches.
        if name.endswith("num_batches_tracked") or ("running_" in name and world > 1):
            continue
        if name not in ours:
            yield f"{name} is not in the checkpoint"
            continue
        far = (ours[name].double() - theirs.double()).abs().max().item()
        if not far <= kind.tolerance:
            yield f"{name} is {far:.1e} away"


def wrong_kinds(
    kinds: list[Kind], world: int, modes_of: Callable[[int], Sequence[str]], folder: Path
) -> list[str]:
    """Train kinds, each in the modes of its number, in one group of ranks; return what is wrong."""
    lines = []
    with LastingRanks(world) as ranks:
        for number, kind in enumerate(kinds):
            for mode in modes_of(number):
                if kind.refused.get(mode) == SKIPS:
                    continue
                found = trained(ranks, world, kind, mode, folder / f"{number}-{mode}")
                lines += [f"{kind.name}, {mode}, {world} ranks: {line}" for line in found]
    return lines


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 3])
def test_all_kinds_do_so(tmp_path: Path, world: int, mode: str) -> None:
    lines = wrong_kinds(PUBLIC, world, lambda number: [mode], tmp_path)
    assert not lines, "\n".join(lines)
