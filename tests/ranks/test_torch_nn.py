"""The classes of torch.nn that ranks could compute otherwise, in every mode: as by plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from nanoray.checkpoint.resume import newest_valid
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.machine.compat import BatchNormBase
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.script.data.source import ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.torch_nn import MODES, SPECIMENS, Around, Specimen, batch

CPU = torch.device("cpu")
BATCH = 12
STEPS = 4
SEED = 1337
SETTINGS: dict[str, Any] = {
    "global_batch_size": BATCH,
    "micro_batch_size": 0,
    "max_steps": STEPS,
    "log_every": STEPS,
    "hash_every": STEPS,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "precision": "fp32",
    "timeout_s": 30,
    "init_timeout_s": 30,
}
TOLERANCE = 2e-5
BY_NAME = {specimen.name: specimen for specimen in SPECIMENS}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD of all that is trained: it shows a wrong factor, and a gradient of zeros."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)


def train(run: Run, names: Sequence[str]) -> None:
    model = Around(BY_NAME[name] for name in names)
    RuntimeEngine(model, optimizer_of(model), run).fit(TensorDataset(*batch(4 * BATCH)))


def alone(specimens: Sequence[Specimen], world: int) -> dict[str, Tensor]:
    """Train in this process, with plain torch; return the weights and buffers.

    A step's batch is computed in as many pieces as there are ranks, as under torch's DDP: each
    begins with the same buffers, and those of the first one are kept. Running statistics of batch
    norms are means over the pieces.
    """
    model = Around(specimens)
    # All of them, or none
    pieces = 1 if specimens[0].over_all_ranks else world
    size = BATCH // pieces
    data = ScriptData(TensorDataset(*batch(4 * BATCH)), None, SEED, BATCH, CPU)
    optimizer = optimizer_of(model)
    averaged = set()
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase):
            averaged |= {f"{name}.running_mean", f"{name}.running_var"}

    for step in range(STEPS):
        optimizer.zero_grad()
        begin = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: list[dict[str, Tensor]] = []
        for piece in range(pieces):
            put_buffers(model, begin)
            inputs, targets = data.train_batch(step * BATCH + piece * size, size)
            seed_generators(derive_seed(SEED, step, 0, piece), CPU)
            (model(inputs, targets) / pieces).backward()
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name in averaged & after[0].keys():
            after[0][name] = torch.stack([buffers[name] for buffers in after]).mean(0)
        put_buffers(model, after[0])
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def put_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.data.copy_(values[name])


def wrong(
    ranks: LastingRanks, world: int, specimens: Sequence[Specimen], mode: str, folder: Path
) -> Iterator[str]:
    """Train specimens together, as one model; yield what differs from plain torch."""
    settings = {"dp_mode": mode, "out_dir": str(folder)}
    spec = open_run(make_config(DEFAULTS | SETTINGS | settings), script_data(), 0.0)
    names = [specimen.name for specimen in specimens]
    outcomes = ranks.train(spec, Program(partial(train, names=names), frozenset(settings)))
    for rank, outcome in enumerate(outcomes):
        if "error" in outcome:
            yield f"rank {rank}: {outcome['error']}: {outcome['message']}"
            return

    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    ours = newest.state.model
    for name, theirs in alone(specimens, world).items():
        if name not in ours:
            yield f"{name} is not in the checkpoint"
            continue
        far = (ours[name].double() - theirs.double()).abs().max().item() if theirs.numel() else 0.0
        if not far <= TOLERANCE:
            yield f"{name} is {far:.1e} away"


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_specimens_train_as_in_plain_torch(tmp_path: Path, world: int, mode: str) -> None:
    """As parts of one model; apart from the others those that look at the samples of all ranks."""
    if world == 1 and mode != "ddp":
        pytest.skip("one rank shares nothing")
    lines: list[str] = []
    with LastingRanks(world) as ranks:
        for over_all_ranks in (False, True):
            together = [each for each in SPECIMENS if each.over_all_ranks is over_all_ranks]
            lines += wrong(ranks, world, together, mode, tmp_path / str(over_all_ranks))
    assert not lines, "\n".join(lines)
