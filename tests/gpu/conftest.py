"""What the tests on a GPU share. Two ranks share the card where there is only one, and the newest
NCCL allows it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanoray.bench.harness.rank_pool import RankPool, Where
from nanoray.parallel.rendezvous import runtime_nccl_version

NCCL_SHARES_A_GPU = (2, 30, 3)


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    """Skip without a GPU; fail under `make test-gpu`, which promises one."""
    if not torch.cuda.is_available():
        reason = "torch sees no GPU; `make test-gpu` runs these tests where there is one"
        if os.environ.get("NANORAY_TEST_GPU"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _in_time() -> None:
    """Skip what begins too late in `make bench-gpu`, which has ten minutes for everything."""
    if time.time() > float(os.environ.get("NANORAY_TEST_GPU_UNTIL", "inf")):
        pytest.skip("no time was left of make bench-gpu")


@pytest.fixture(scope="session", params=["nccl", "gloo"])
def pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks on GPUs, with each backend."""
    with RankPool(
        Where(2, device="cuda", backend=backend(request.param), timeout_s=60, shared=True)
    ) as pool:
        yield pool


def backend(name: str) -> str:
    """Return the backend's name; skip where two ranks cannot use it here."""
    version = runtime_nccl_version()
    if (
        name == "nccl"
        and torch.cuda.device_count() < 2
        and (version or (0, 0, 0)) < NCCL_SHARES_A_GPU
    ):
        pytest.skip(f"one GPU, and NCCL {version} refuses two ranks on it (2.30.3 allows it)")
    return name


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with something to learn, as tests/conftest.py has one, which wants Ray."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 6))) for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(source.choices(words, k=12000)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def gpu_recipe(tmp_path_factory: pytest.TempPathFactory, text: Path) -> list[str]:
    """Flags of a small recipe on the tests' text, with dropout, on a GPU."""
    cache = tmp_path_factory.mktemp("cache")
    shape = [
        "--n_layer",
        "2",
        "--n_head",
        "2",
        "--n_embd",
        "64",
        "--block_size",
        "32",
        "--dropout",
        "0.1",
    ]
    length = [
        "--max_steps",
        "12",
        "--warmup_steps",
        "2",
        "--global_batch_size",
        "24",
        "--lr",
        "3e-3",
    ]
    rhythm = [
        "--log_every",
        "1",
        "--eval_every",
        "6",
        "--eval_samples",
        "24",
        "--sample_tokens",
        "0",
    ]
    return [
        "--dataset",
        str(text),
        "--data_dir",
        str(cache),
        "--device",
        "cuda",
        *shape,
        *length,
        *rhythm,
    ]
