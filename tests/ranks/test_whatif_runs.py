"""What if, asked of real runs whose state is sharded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanoray.forecast import whatif
from tests.harness.commands import torchrun
from tests.harness.ranks import only_run


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero1", "zero2", "fsdp"])
def test_a_sharded_run_is_predicted_beside_its_measurement(
    mode: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is a machine's; that the run's own ranks change nothing, and one rank waits for
    nobody, is not.
    """
    flags = [
        "--preset=tiny",
        "--device=cpu",
        f"--dataset={text}",
        f"--data_dir={tmp_path}/data",
        "--comm_trace=always",
    ]
    flags += [
        f"--out_dir={tmp_path}/runs",
        "--max_steps=24",
        "--eval_every=10",
        f"--dp_mode={mode}",
    ]
    for done in torchrun(2, "nanoray.train", *flags):
        assert done.returncode == 0, done.stdout + done.stderr
    assert whatif.main([str(only_run(tmp_path / "runs")), "--ranks", "1,2,4"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"^error  predicted ([0-9.]+) ms, measured ([0-9.]+) ms", said, re.M)
    assert found, said
    assert 0.3 < float(found[1]) / float(found[2]) < 3, said
    rows = {row[:9]: row.split()[-4:-2] for row in said.splitlines()[4:]}
    assert rows["ranks 2  "] == rows["as it was"], said
    assert rows["ranks 1  "][1] == "0.0", said
    assert float(rows["ranks 1  "][0]) <= float(rows["as it was"][0]), said
