"""Run the code cells of a notebook in this process: python tests/harness/notebook.py FILE.ipynb
[NAME=JSON ...]

The names replace what the cell with the tag `parameters` sets, as papermill does it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str, *values: str) -> None:
    """Run the cells in order, in one namespace, and print the seconds that each took."""
    sys.executable = os.environ.get("PYTHON", sys.executable)  # of the commands in its cells
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        began = time.perf_counter()
        exec(
            compile("".join(cell["source"]), f"{Path(path).name}, code cell {number}", "exec"),
            names,
        )
        if "parameters" in cell["metadata"].get("tags", []):
            names |= {
                name: json.loads(value)
                for name, _, value in (text.partition("=") for text in values)
            }
        print(f"[cell {number}: {time.perf_counter() - began:.2f} s]", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
