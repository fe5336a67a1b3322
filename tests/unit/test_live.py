"""`nanoray inspect RUN --live` on a real run that hangs, after its end, on GPUs of a made-up NVML;
what it refuses.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from nanoray.faults.progress import ProgressFile
from nanoray.tools.inspect import live
from nanoray.tools.inspect.__main__ import main
from nanoray.train.guard.certificate import append
from tests.harness.cluster import end_session
from tests.harness.commands import Command, wait_for
from tests.harness.ranks import only_run
from tests.unit.test_devices import FakeNvml, h200


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(run), "--live"]) == 0
    return capsys.readouterr().out


def test_a_rank_that_hangs_and_the_end(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--log_every", "1", "--faults", "hang@rank=0,step=5,phase=backward")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    process = Command(
        "nanoray.train", "--config", str(recipe), "--out_dir", str(tmp_path), *flags, env=env
    )
    try:
        wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), process=process)
        said = shown(run := only_run(tmp_path), capsys)
        pid = process.pid
        assert re.search(rf"^run    {run.name}, running, attempt 0$", said, re.M)
        assert re.search(
            r"^newest step 4/30 · loss \d\.\d{4} · eta 0:\d\d · recorded 0:\d\d ago$", said, re.M
        )
        assert re.search(
            rf"^0     5     backward  \d+\.\d s  {pid} *  [0-9.]+ GiB  \d+ %$", said, re.M
        ), said
        assert float(re.findall(r"([0-9.]+) GiB", said)[0]) > 0.05
        assert float(re.findall(r"backward  ([0-9.]+) s", said)[0]) >= 0.5, (
            "it has slept for the sample"
        )
    finally:
        end_session(process)
    said = shown(run, capsys)
    assert f"{run.name}, no process of it on this host, attempt 0" in said
    assert re.search(r"^0     5     backward  \?      \?    \?       \?$", said, re.M), said
    (run / "summary.json").write_text('{"exit_reason": "finished"}')
    assert f"{run.name}, ended: finished" in shown(run, capsys)
    (run / "summary.json").write_text('{"exit_re')
    assert f"{run.name}, ended, and its summary.json is damaged" in shown(run, capsys)


def test_gpus_and_slices_and_what_nvml_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rank 0, on a slice; a whole GPU is another job's. Of rank 1 there is no
    process here.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "config.json").write_text('{"device": "auto", "max_steps": 5}')
    (tmp_path / "logs").mkdir()
    position = ProgressFile(tmp_path / "logs" / "rank0.progress")
    position.set(3, "forward")
    (tmp_path / "logs" / f"rank0.host-{os.getpid()}.ledger").touch()
    cut = h200("b", "1g.18gb", "1g.18gb") | {"milliwatts": 310_500}
    cut["slices"][0] |= {"pids": []}
    cut["slices"][1] |= {"used_mib": 2048, "pids": [os.getpid()]}
    whole = h200("a") | {"busy": 87, "used_mib": 1024, "milliwatts": 612_000, "pids": [1]}
    assert live.lines(tmp_path, FakeNvml(whole, cut))[-5:] == [
        "gpu  name                     busy     memory            power    ranks",
        "0    NVIDIA H200              87 %     1.0 of 140.4 GiB  612 W    none",
        "1    NVIDIA H200              unknown  0.0 of 140.4 GiB  310 W    unknown",
        "1/0  NVIDIA H200 MIG 1g.18gb  unknown  0.0 of 16.0 GiB   unknown  none",
        "1/1  NVIDIA H200 MIG 1g.18gb  unknown  2.0 of 16.0 GiB   unknown  0",
    ]
    cut["slices"][1] |= {"pids": [4242]}
    hidden = live.lines(tmp_path, FakeNvml(whole | {"mib": None}, cut))
    assert [line.split()[-1] for line in hidden[-4:]] == ["unknown"] * 4, (
        "the host's process ids say nothing here"
    )
    assert re.search(r"^0 +NVIDIA H200 +87 % +unknown +612 W", hidden[-4])
    (tmp_path / "config.json").write_text('{"device": "cpu", "max_steps": 5}')
    assert "NVIDIA" not in "".join(live.lines(tmp_path, FakeNvml(whole)))


def test_ranks_of_an_earlier_and_larger_command_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not so one that has a process: it starts, and its group is not noted yet."""
    (tmp_path / "config.json").write_text('{"device": "cpu", "max_steps": 5}')
    (tmp_path / "logs").mkdir()
    positions = [ProgressFile(tmp_path / "logs" / f"rank{rank}.progress") for rank in range(4)]
    monkeypatch.chdir(tmp_path)
    assert [line[0] for line in shown(Path("."), capsys).splitlines()[2:]] == ["0", "1", "2", "3"]
    for group, slots in ((0, 4), (2, 2)):
        append(tmp_path, {"group": group, "ranks": slots, "slots": slots})
    (tmp_path / "logs" / f"rank3.host-{os.getpid()}.ledger").touch()
    positions[3].set(2, "init")
    told = shown(Path("."), capsys).splitlines()
    assert told[0].startswith(f"run    {tmp_path.name}, ")
    assert [line[0] for line in told[2:]] == ["0", "1", "3"]


def test_nothing_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--live"]) == 2
    assert f"{tmp_path} is no folder of a run (no config.json)" in capsys.readouterr().err
    assert main([str(tmp_path), "--live", "--tp", "2"]) == 2
    assert (
        "--live shows a run as it is, so --tp would be ignored; drop one of the two"
        in capsys.readouterr().err
    )


def test_it_needs_no_torch() -> None:
    done = os.spawnv(
        os.P_WAIT,
        sys.executable,
        [
            sys.executable,
            "-c",
            "import nanoray.tools.inspect.live, sys; sys.exit('torch' in sys.modules)",
        ],
    )
    assert done == 0
