"""`nanoray inspect RUN --live` on a real run that hangs, after its end, and what it refuses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from nanoray.inspect.__main__ import main
from tests.harness.cluster import end_session, only_run, wait_for
from tests.harness.commands import Command


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(run), "--live"]) == 0
    return capsys.readouterr().out


def test_a_rank_that_hangs_and_the_end(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--log_every", "1", "--faults", "hang@rank=0,step=5,phase=backward")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    process = Command("nanoray.train", "--config", str(recipe), "--out_dir", str(tmp_path), *flags, env=env)
    try:
        wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), process=process)
        said = shown(run := only_run(tmp_path), capsys)
        pid = process.pid
        assert re.search(rf"^run    {run.name}, running, attempt 0$", said, re.M)
        assert re.search(r"^newest step 4/30 · loss \d\.\d{4} · eta 0:\d\d · recorded 0:\d\d ago$", said, re.M)
        assert re.search(rf"^0     5     backward  \d+\.\d s  {pid} *  [0-9.]+ GiB  \d+ %$", said, re.M), said
        assert float(re.findall(r"([0-9.]+) GiB", said)[0]) > 0.05
        assert float(re.findall(r"backward  ([0-9.]+) s", said)[0]) >= 0.5, "it has slept for the sample"
    finally:
        end_session(process)
    said = shown(run, capsys)
    assert f"{run.name}, no process of it on this host, attempt 0" in said
    assert re.search(r"^0     5     backward  \?      \?    \?       \?$", said, re.M), said
    (run / "summary.json").write_text('{"exit_reason": "finished"}')
    assert f"{run.name}, ended: finished" in shown(run, capsys)


def test_nothing_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--live"]) == 2
    assert f"{tmp_path} is no folder of a run (no config.json)" in capsys.readouterr().err
    assert main([str(tmp_path), "--live", "--tp", "2"]) == 2
    assert "--live shows a run as it is, so --tp would be ignored; drop one of the two" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    done = os.spawnv(
        os.P_WAIT,
        sys.executable,
        [sys.executable, "-c", "import nanoray.inspect.live, sys; sys.exit('torch' in sys.modules)"],
    )
    assert done == 0
