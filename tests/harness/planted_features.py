"""tests/gpu/features.py with features that end badly: a test asks for them among good ones."""

from __future__ import annotations

import os
import signal
import time

from tests.gpu import features
from tests.gpu.features import Bench, FeatureResult


def crash(bench: Bench) -> FeatureResult:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("it lives on")


def hang(bench: Bench) -> FeatureResult:
    time.sleep(600)
    raise AssertionError("nobody ended it")


def wrong(bench: Bench) -> FeatureResult:
    return FeatureResult([("distance", "", 1.0)], 1)


def broken(bench: Bench) -> FeatureResult:
    raise RuntimeError("no kernel for these shapes")


def parent(bench: Bench) -> FeatureResult:
    """The process that forked this one; a fork of one that has counted GPUs cannot use them."""
    return FeatureResult([("distance", "", float(os.getppid()))], 0)


features.FEATURES |= {"crash": crash, "hang": hang, "wrong": wrong, "broken": broken}
features.FEATURES |= {"parent": parent}

if __name__ == "__main__":
    raise SystemExit(features.main())
