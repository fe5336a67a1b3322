"""Tests that need a package which may be missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a file's tests without one of the packages.

    pytest.importorskip would import it in each worker that lists the tests, and mlflow takes
    seconds.
    """
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
