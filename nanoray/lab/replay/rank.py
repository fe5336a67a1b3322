"""One rank of a re-enactment: `nanoray train`, which ends with the command that started it.

    nanoray replay ─► python -m nanoray.lab.replay.rank, its stdin a pipe without any text

However the command ends, by SIGKILL too, the kernel closes its end of the pipe.
"""

from __future__ import annotations

import os
import sys
import threading


def main() -> int:
    """Train as the command line says, and return the exit code."""
    threading.Thread(target=end_with_stdin, name="nanoray-parent", daemon=True).start()
    # Imported late: the import takes seconds, in which the command may end.
    from nanoray.train.__main__ import main as train

    return train(sys.argv[1:])


def end_with_stdin() -> None:
    """Wait until stdin is closed, and end this process at once: its steps are of no use."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
