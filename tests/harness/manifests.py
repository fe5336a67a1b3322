"""The manifests of kuberay/, each folder built once by kubectl, and rendered ones held to the rules."""

from __future__ import annotations

import copy
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanoray.config import Config
from nanoray.kube import kustomize
from nanoray.kube.render import KUBE_DIR
from nanoray.kube.render import render as render_unchecked
from tests.harness.kube_rules import problems

Object = dict[str, Any]


def build(folder: Path) -> list[Object]:
    """Return the objects of a folder, in a copy of one's own; skip the test without kubectl."""
    require_kubectl()
    if folder.is_relative_to(KUBE_DIR):
        return copy.deepcopy(_committed(folder))
    return kustomize.build(folder)


def require_kubectl() -> None:
    """Skip the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which builds the manifests, is not installed")


@cache
def _committed(folder: Path) -> list[Object]:
    return kustomize.build(folder)


def render(config: Config, started: float) -> list[Object]:
    """Return what `nanoray kube render` makes of a configuration, which keeps the rules."""
    objects = render_unchecked(config, started)
    assert problems(objects) == []
    return objects
