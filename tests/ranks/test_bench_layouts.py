"""`python -m nanoray.bench layouts predicted`: a real quick run at 2 and 4 ranks, and its predictions from
links made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import layouts
from nanoray.bench.fit import Fit
from nanoray.bench.layouts import Here, arms_of
from nanoray.bench.predicted import ERROR, MEASURED, PREDICTED
from nanoray.config import load_config
from nanoray.config.layout import Layout

CONFIG = load_config(preset="shakespeare-cpu")
FREE = Fit("backend", 2, 0.0, 0.0, (0.0,), 1, 2)


def here(alpha_s: float, split_s: float = 0.5) -> Here:
    parts = {"forward_s": 1.0, "backward_s": 2.0, "update_s": 0.5}
    links = dict.fromkeys(layouts.OPS, Fit("backend", 2, alpha_s, 0.0, (0.0,), 1, 2))
    return Here(
        links,
        dict.fromkeys(layouts.OPS, FREE),
        {1: parts, 2: {k: split_s * v for k, v in parts.items()}},
    )


def test_predictions_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores: 3 s of compute and 0.5 s of update, on 8 ranks four times as long. The update is
    shared by zero1.
    """
    monkeypatch.setattr(layouts, "available_cpus", lambda: 2.0)
    free = here(0.0)
    assert free.predict(CONFIG, Layout(dp=2), "ddp_by_hand") == pytest.approx(3.5)
    assert free.predict(CONFIG, Layout(dp=2), "zero1") == pytest.approx(3.25, rel=1e-4)
    assert free.predict(CONFIG, Layout(dp=8), "ddp_by_hand") == pytest.approx(4 * 3.5)
    half = free.predict(CONFIG, Layout(tp=2), "ddp_by_hand")
    assert 1.5 + 0.25 < half < 1.5 + 0.27, "norms and positions are not cut"
    assert here(0.0, 0.75).predict(CONFIG, Layout(tp=2), "ddp_by_hand") == pytest.approx(
        half + 0.75
    ), "half is uncut"
    slow = here(0.001).predict(CONFIG, Layout(tp=2), "ddp_by_hand")
    # 2·4 + 1 sums forward and backward each, 2 of the loss, a norm
    assert slow - half == pytest.approx(21 * 2 * 0.001)


def test_a_real_quick_run(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(layouts)
    files = [
        f"--{flag}={tmp_path / f'r.{end}'}" for flag, end in (("json", "json"), ("figure", "svg"))
    ]
    argv = [
        "layouts",
        "predicted",
        "--quick",
        "--preset",
        "tiny",
        "--ranks",
        "2,4",
        *files,
    ]
    assert bench.main(argv) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    assert "\n4 ranks: dp 2 × tp 2, zero1 " in out
    written = json.loads((tmp_path / "r.json").read_text())
    rows = {(r["arm"], r["metric"]): r for r in written["rows"]}
    config = load_config(preset="tiny")
    arms = [arm for n in (2, 4) for arm in arms_of(config, n)]
    assert {arm for arm, _ in rows} == set(arms)
    for arm in arms:
        (measured,), (predicted,), (error,) = (
            rows[arm, metric]["values"] for metric in (MEASURED, PREDICTED, ERROR)
        )
        assert error == pytest.approx(abs(predicted / measured - 1))
        assert min(measured, predicted) > 0
    assert len(written["targets"]) == len(arms)
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
