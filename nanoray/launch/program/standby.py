"""The process of a rank's program: it stands ready with torch imported, and becomes the program.

    import modules ─► wait for one line of JSON on stdin ─► the script is __main__, or the command is exec'd

It is started as a file, so that the program finds nothing of nanoray in it. With torch imported before
a rank is lost, a restart takes the time of the program alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import types
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Wait for the order, and become the program."""
    end_with_parent()
    for module in sys.argv[1:]:
        with suppress(ImportError):  # the program may need no torch
            importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return  # this rank has ended without it
    order: dict[str, Any] = json.loads(line)
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    os.environ["PWD"] = os.getcwd()  # that of a shell, which some programs read
    # Ray blocks and ignores Ctrl-C in what it starts; a program that sends it to itself gets it.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # No program waits for a keyboard that no rank has.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115

    words: list[str] = order["words"]
    if order["kind"] == "command":
        os.execvp(words[0], words)
    # The stacks of all threads, on stderr, when the driver finds that no rank moves.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.argv = words
    sys.excepthook = show_error
    if order["kind"] == "module":
        sys.path[0] = os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        run_script(words[0])


def show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an error of the program as Python does, without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def end_with_parent() -> None:
    """Let the kernel end this process when the rank's actor is gone."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        raise SystemExit(1)


def run_script(path: str) -> None:
    """Run a file as Python would: its folder is sys.path[0], and the module is __main__ to the end."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        # Annotations stay what they are in the script, whatever this file imports from __future__.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
