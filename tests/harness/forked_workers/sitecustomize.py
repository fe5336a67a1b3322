"""Python imports this at its start, in processes whose PYTHONPATH has this folder: see
tests/harness/ray_workers.py.
"""

import os
import sys


def hand_over(path: str, command: list[str]) -> None:
    """Let the server at `path` fork a process that runs `command`, and live as long as that; or do
    nothing.
    """
    import array
    import json
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:  # it is gone: this process does the work itself
            return
        order = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
        streams = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2])
        server.sendmsg([len(order).to_bytes(4, "little")], [streams])
        server.sendall(order)
        server.recv(1)
    os._exit(0)


if "NANORAY_TEST_RAY_WORKERS" in os.environ:
    words = sys.orig_argv
    for at, word in enumerate(words):
        # Variables of its own are set by a process that then executes this command anew. A worker
        # with files of its own, as those of jobs, starts by itself: its modules may be others.
        own = any(w.startswith("--runtime-env-hash=") and not w.endswith("=0") for w in words)
        unset = own and any(w.startswith("--serialized-runtime-env-context=") for w in words)
        has_files = own and "/runtime_resources/" in os.environ.get("PYTHONPATH", "")
        is_worker = word.endswith("/ray/_private/workers/default_worker.py")
        if is_worker and not unset and not has_files:
            hand_over(os.environ["NANORAY_TEST_RAY_WORKERS"], words[at:])
    if words[1:3] == ["-m", "ray.scripts.scripts"]:
        # `ray start` also offers the commands of Ray Serve, and goes on without it: half of its imports
        sys.modules["ray.serve"] = None
