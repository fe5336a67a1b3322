"""A step in the steady state: it takes no new memory from the system, and reads few numbers of
tensors.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.train.rank import train
from tests.harness.alone import engine_of
from tests.harness.ranks import make_spec, run_ranks


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors: on a GPU it would wait for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def reads_of(spec: Any) -> int:
    engine = engine_of(spec)
    with Reads() as reads:
        engine.fit()
    return reads.count


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({}, 3),
        pytest.param({"grad_clip": 0.0}, 2, marks=pytest.mark.full),
        pytest.param(
            {"precision": "bf16", "dropout": 0.1, "grad_accum_steps": 2}, 3, marks=pytest.mark.full
        ),
        ({"precision": "fp16"}, 3),
        pytest.param({"dp_mode": "ddp_by_hand"}, 3, marks=pytest.mark.full),
    ],
    ids=["plain", "no clipping", "bf16", "fp16", "ddp_by_hand"],
)
def test_a_step_that_is_not_logged_waits_for_no_more_than_it_must(
    text: Path, tmp_path: Path, settings: dict[str, Any], each: int
) -> None:
    """The outcome of the vote, which is on the host. On a CPU also whether the step is bad, and
    whether to clip.
    """
    recipe = {"precision": "fp32", "eval_every": 0, "log_every": 100, "hash_every": 0} | settings
    few, many = (
        reads_of(make_spec(text, tmp_path / str(n), max_steps=n, **recipe)) for n in (3, 13)
    )
    assert many - few == 10 * each


def train_and_count(spec: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    """Train, and return how many pages this process has taken from the system."""
    train(spec, rendezvous)
    return {"pages": resource.getrusage(resource.RUSAGE_SELF).ru_minflt}


@pytest.mark.full
def test_a_step_takes_no_new_memory_from_the_system(text: Path, tmp_path: Path) -> None:
    """Its tensors, of up to 1.5 MB, lie where those of the step before it were."""
    settings = {
        "dataset": str(text),
        "data_dir": str(tmp_path),
        "out_dir": str(tmp_path),
        "eval_every": 0,
        "log_every": 100,
        "tensorboard": False,
        "precision": "fp32",
    }
    faults = []
    for steps in (10, 60):
        config = load_config(None, "shakespeare-cpu", settings | {"max_steps": steps})
        spec = open_run(config, prepare(config), time.time())
        # A process of its own: another run's memory would lie ready in this one.
        (outcome,) = run_ranks(spec, 1, timeout_s=300, train=train_and_count)
        faults.append(outcome["pages"])
    assert faults[0] > 0
    assert (faults[1] - faults[0]) / 50 < 200, (
        "pages a step: without what keeps freed memory they are over 1000"
    )
