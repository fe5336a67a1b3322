"""Fixtures and settings that need neither torch nor Ray. conftest.py takes them over."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for variable in ("RAY_ADDRESS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
    os.environ.pop(variable, None)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# On a busy machine an example, and drawing it, may take long.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


_caches = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep token caches of tests out of ~/.cache. Most tests need none, so nothing is made here."""
    folder = Path(tempfile.gettempdir(), f"cache-{os.getpid()}-{next(_caches)}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file with something to learn: random words of a small vocabulary, 60 kB."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 6))) for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(source.choices(words, k=12000)) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shakespeare() -> Path:
    """The real Shakespeare, where NANORAY_TEST_SHAKESPEARE names it."""
    path = os.environ.get("NANORAY_TEST_SHAKESPEARE", "")
    if not path or not Path(path).is_file():
        pytest.skip("NANORAY_TEST_SHAKESPEARE does not name a copy of tinyshakespeare's input.txt")
    return Path(path)


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kubectl build each committed folder of kuberay/ once; skip the test without kubectl."""
    from tests.harness.manifests import build, require_kubectl

    require_kubectl()
    monkeypatch.setattr("nanoray.kube.render.build", build)
