"""What recovery over NCCL rests on, checked on NCCL one by one: two ranks, on two GPUs or on one.

tests/harness/nccl_assumptions.py has the list with its sources. docs/gpu.md says where it has run.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from nanoray.parallel.rendezvous import RankDevice, choose_backend, runtime_nccl_version
from tests.gpu.conftest import backend
from tests.harness.nccl_assumptions import ASSUMPTIONS, Assumption, Ranks, observe


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Return two ranks over NCCL, each in a fresh process: CUDA does not survive a fork."""
    backend("nccl")
    cards = [str(rank % torch.cuda.device_count()) for rank in range(2)]
    devices = [RankDevice("cuda", "here", card) for card in cards]
    choice = choose_backend(devices, "nccl", runtime_nccl_version())
    return Ranks(multiprocessing.get_context("spawn"), "nccl", "cuda", choice.env)


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda each: each.id)
def test_nccl_does_what_is_assumed(assumption: Assumption, ranks: Ranks) -> None:
    observe(assumption, ranks)
