"""`python -m nanoray.bench precision`: every mode at small size, and a real quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import precision
from nanoray.bench.precision_lab import Lab, Training
from nanoray.cli.forecast.memory import Sizes, state_memory
from nanoray.config import make_config
from nanoray.data.prepare import prepare
from nanoray.data.tokens import TokenData


@pytest.fixture(scope="module")
def lab(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    where = {"dataset": str(text), "data_dir": str(tmp_path_factory.mktemp("lab")), "max_steps": 40}
    config = make_config(precision.TINY | where | {"lr": 3e-3, "min_lr": 1e-5, "warmup_steps": 4})
    info = prepare(config)
    return Lab(config, TokenData(info, config.block_size, config.seed), info.vocab_size)


@pytest.mark.parametrize("mode", precision.MODES)
def test_every_mode_learns_and_holds_what_the_formula_says(lab: Lab, mode: str) -> None:
    run = Training(lab, **precision.MODES[mode])
    for _ in range(12):
        run.step()
    assert run.losses[-1] < run.losses[0]
    formula = state_memory(run.config, Sizes.of(run.model), 1, 1, 1.0)
    assert sum(run.held.values()) == pytest.approx(sum(formula.values()), rel=0.01)


@pytest.mark.full
def test_a_real_quick_run(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        f"--{flag}={tmp_path / f'r.{end}'}" for flag, end in (("json", "json"), ("figure", "svg"))
    ]
    assert bench.main(["precision", "--quick", "--dataset", str(text), *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    written: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    rows = {(r["arm"], r["metric"]) for r in written["rows"] if r["values"]}
    assert {
        (mode, metric) for mode in precision.MODES for metric in (precision.STEP, precision.STATE)
    } <= rows
    assert "FAILED" not in out
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
