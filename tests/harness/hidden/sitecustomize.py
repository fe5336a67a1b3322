"""On PYTHONPATH, it hides installed packages: those that NANORAY_TEST_HIDDEN names.

A package of the same name in a folder that is no site-packages is found, as a stand-in is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

NAMES = set(filter(None, os.environ.get("NANORAY_TEST_HIDDEN", "").split(",")))


class Hide(PathFinder):
    """Finds hidden packages outside of site-packages only."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname in NAMES:
            path = [folder for folder in sys.path if "site-packages" not in folder]
        return PathFinder.find_spec(fullname, path, target)


if NAMES:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
