"""Runs that begin with given weights: on real ranks, in each mode, and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanoray.checkpoint.files import load
from nanoray.models.gpt import ModelShape
from nanoray.train.rank import train
from tests.harness import foreign
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.ranks import make_spec, series

# As the weights are; plain SGD, so that a constant factor shows
KEYS: dict[str, Any] = {
    "bias": True,
    "gelu": "tanh",
    "tokenizer": "byte",
    "optimizer": "sgd",
    "grad_clip": 0.0,
    "lr": 0.01,
    "max_steps": 3,
    "warmup_steps": 0,
    "schedule": "constant",
    "precision": "fp32",
}
EXPERTS = {"experts": 2, "experts_per_token": 1, "expert_hidden": 16}
TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_by_hand": {"dp_mode": "ddp_by_hand"},
    "zero1": {"dp_mode": "zero1"},
    "zero2": {"dp_mode": "zero2"},
    "fsdp": {"dp_mode": "fsdp"},
    "tp": {"tp": 2},
    "tp sequence": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "grad_accum_steps": 2, "global_batch_size": 12},
    "ep": {"ep": 2, "dp_mode": "ddp_by_hand", **EXPERTS},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp × pp": {"tp": 2, "pp": 2, "grad_accum_steps": 2, "global_batch_size": 12},
    "tp × fsdp": {"tp": 2, "dp_mode": "fsdp"},
    "pp × zero2": {"pp": 2, "dp_mode": "zero2"},
    "ep × zero1": {"ep": 2, "dp_mode": "zero1", **EXPERTS},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of weights, one with experts."""
    folder = tmp_path_factory.mktemp("sources")
    dense = ModelShape(2, 2, 32, 24, True, 256, gelu="tanh")
    mixed = ModelShape(2, 2, 32, 24, True, 256, **EXPERTS, gelu="tanh")
    return {
        "dense": foreign.own_weights(folder / "dense.safetensors", dense, std=0.7),
        "experts": foreign.own_weights(folder / "experts.safetensors", mixed, std=0.7),
    }


@pytest.fixture(scope="module")
def one() -> Iterator[LastingRanks]:
    with LastingRanks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LastingRanks]:
    with LastingRanks(2) as ranks:
        yield ranks


def losses(
    ranks: LastingRanks, text: Path, out: Path, source: Path, keys: dict[str, Any]
) -> dict[int, float]:
    spec = make_spec(text, out, init_from=str(source), **KEYS | keys)
    outcomes = ranks.train(spec, train)
    assert all("error" not in outcome for outcome in outcomes), outcomes
    return series(spec)


def require_one_process(
    arms: dict[str, dict[str, Any]],
    many: LastingRanks,
    one: LastingRanks,
    sources: dict[str, Path],
    text: Path,
    tmp_path: Path,
) -> None:
    """Each mode has the losses of one process, from the same weights."""
    expected = {}
    for kind, keys in (("dense", {}), ("experts", EXPERTS)):
        expected[kind] = losses(one, text, tmp_path, sources[kind], keys)
        # Random weights of nanoray begin at ln(256) = 5.55
        assert expected[kind][1] > 6.5, "these are not the weights of the source"
    for name, keys in arms.items():
        kind = "experts" if "experts" in keys else "dense"
        found = losses(many, text, tmp_path, sources[kind], keys)
        assert found == pytest.approx(expected[kind], rel=2e-5), name


@pytest.mark.full
def test_two_ranks_begin_with_the_same_weights(
    two: LastingRanks, one: LastingRanks, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    require_one_process(TWO, two, one, sources, text, tmp_path)


@pytest.mark.full
def test_four_ranks_begin_with_the_same_weights(
    one: LastingRanks, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    with LastingRanks(4) as four:
        require_one_process(FOUR, four, one, sources, text, tmp_path)


@pytest.mark.parametrize("precision", ["bf16_pure", "fp8"])
def test_weights_of_few_bits_are_those_of_the_source(
    precision: str, one: LastingRanks, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """The optimizer's masters, too: they are copies of the weights."""
    keys = {"precision": precision, "lr": 1e-12, "min_lr": 0.0}
    keys |= {"checkpoint_every": 1, "max_steps": 1}
    if precision == "bf16_pure":
        keys["master_weights"] = "fp32"
    spec = make_spec(text, tmp_path, init_from=str(sources["dense"]), **KEYS | keys)
    (outcome,) = one.train(spec, train)
    assert "error" not in outcome, outcome
    before = load_file(sources["dense"])
    state = load(spec.checkpoints / "step_00000001")
    for name, tensor in state.model.items():
        first = before[name][: len(tensor)]  # of the positions
        assert torch.equal(tensor, first.to(tensor.dtype)), name
    masters = {n: t for n, t in state.optimizer.items() if n.startswith("master.")}
    assert bool(masters) == (precision == "bf16_pure")
    for name, tensor in masters.items():
        torch.testing.assert_close(tensor, state.model[name.partition(".")[2]].float())


def test_a_resumed_run_does_not_read_them_again(
    one: LastingRanks, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Neither does it need the file, and config.json still names it."""
    source = tmp_path / "source.safetensors"
    source.write_bytes(sources["dense"].read_bytes())
    keys = KEYS | {"max_steps": 4, "checkpoint_every": 2}
    whole = make_spec(text, tmp_path / "whole", init_from=str(source), **keys)
    assert "error" not in one.train(whole, train)[0]

    half = make_spec(text, tmp_path / "half", init_from=str(source), **keys | {"stop_at": 2})
    assert "error" not in one.train(half, train)[0]
    source.unlink()
    rest = make_spec(
        text, tmp_path / "half", init_from=str(source), **keys | {"resume": str(half.folder)}
    )
    assert rest.folder == half.folder
    assert "error" not in one.train(rest, train)[0]
    assert series(rest) == series(whole)
    assert json.loads((rest.folder / "config.json").read_text())["init_from"] == str(source)
