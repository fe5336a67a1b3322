"""A script that is imported by a process which it has spawned starts no run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A script that trains where it stands, without the line that Python asks for.
UNGUARDED = """
import multiprocessing, sys
import nanoray

def work(x):
    return CODE

CODE = None
if __name__ == "__mp_main__":
    CODE = nanoray.launch(work, {"out_dir": sys.argv[1]})
else:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1])[0])
"""


def test_a_script_that_is_imported_by_a_process_it_spawned_starts_no_run(tmp_path: Path) -> None:
    """A Pool, or a DataLoader's workers: each would train the model anew, in a folder of its own."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "2\n"
    words = (
        "a process that multiprocessing has spawned imports this script, and came upon a run there"
    )
    assert done.stderr.startswith(f"error: {words}; put what trains below `if __name__ == ")
    assert not (tmp_path / "runs").exists()
