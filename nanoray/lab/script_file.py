"""Run the file of a script up to its nanoray.launch(main, config), for `check` and `inspect`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nanoray
import nanoray.script.engine
from nanoray.errors import ConfigError

NO_LAUNCH = (
    "it does not call nanoray.launch(main, config), which is needed here; make model, optimizer and "
    "data in a function main(run), and end the script with nanoray.launch(main, config)"
)


class NotLaunched(ConfigError):
    """A script that has ended before its nanoray.launch."""


class ScriptEnded(BaseException):
    """Ends a script in its nanoray.launch."""


def run_until_launch(
    script: str, arguments: Sequence[str], use: Callable[[Callable[..., Any], Any], None]
) -> None:
    """Run a script as `python SCRIPT.py ARGUMENTS` does, and end it in its nanoray.launch.

    There `use` is called with the function and the configuration. Raises NotLaunched, or what the
    script or `use` raises.
    """

    launched = False

    def launch(package: Any, main: Any, config: Any = None, ray: bool = True) -> None:
        nonlocal launched
        launched = True
        use(main, config or {})
        raise ScriptEnded

    def fit_here(*_: Any) -> None:
        raise ScriptEnded

    # The package is what scripts call, by whatever name they have imported it.
    package: Any = type(nanoray.launch)
    engine: Any = nanoray.script.engine
    before = (package.__call__, engine.fit_here, sys.argv, [*sys.path])
    package.__call__, engine.fit_here = launch, fit_here
    sys.argv = [script, *arguments]
    # Python puts the folder of a script first, so its own modules win over installed ones.
    sys.path.insert(0, str(Path(script).resolve().parent))
    why = NO_LAUNCH
    try:
        runpy.run_path(script, run_name="__main__")
    except ScriptEnded:
        pass
    except SystemExit as ended:
        if ended.code:
            why = (
                f"it has ended with {ended.code!r} before nanoray.launch; give its own arguments "
                "behind --, as in train.py -- --width 64"
            )
    finally:
        # The list is restored in place, because other modules may hold a reference to it.
        package.__call__, engine.fit_here, sys.argv, sys.path[:] = before
    if not launched:
        raise NotLaunched(f"{script} cannot be used: {why}")
