"""What a script finds around itself; rank 0 prints it. It imports no torch."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path


def spawned(count: int) -> None:
    print("finds", __name__, count, flush=True)


def main() -> None:
    print("finds", sys.argv[1:], __name__, Path(__file__).name)
    print("finds", Path(sys.path[0]).resolve() == Path(__file__).resolve().parent)
    print("finds", os.getcwd() == os.environ["PWD"], sys.stdout.encoding)
    print("finds", spawned.__annotations__)  # classes, not their names
    print("finds", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    print("finds", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    print("finds", [os.environ.get(name) for name in ("FIRST", "SECOND", "PYTHONBREAKPOINT")])
    print("finds", sys.modules.keys() & {"nanoray", "ray"})
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(3,))
    process.start()
    process.join()
    # A progress bar, in writes that end within a character
    for _ in range(3):
        os.write(1, "\rloss █▌é".encode()[:-1])
        time.sleep(0.3)
        os.write(1, "é".encode()[-1:])
    print("\nfinds the end")


if __name__ == "__main__" and os.environ["RANK"] == "0":
    main()
