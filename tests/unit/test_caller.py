"""The Ray that a program is connected to already, where a run cannot use it."""

from __future__ import annotations

import multiprocessing
import sys
from types import ModuleType, SimpleNamespace

import pytest
import ray

from nanoray.config import load_config
from nanoray.errors import ConfigError
from nanoray.launch.caller import ray_address
from nanoray.launch.recovery.pickled_script import PickledScript, ScriptFile


def connect(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let Ray say that this process is connected."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(gcs_address=address)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(preset="tiny")
    with monkeypatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "ray://192.0.2.1:10001")
        with pytest.raises(ConfigError, match=r"Ray Client .*ray job submit"):
            ray_address(config)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(ConfigError, match=r"Ray Client .*ray job submit"):
        ray_address(config)


@pytest.mark.parametrize("asked", ["auto", "127.0.0.1:6379", "localhost:6379"])
def test_an_address_that_names_the_same_ray_is_no_contradiction(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    connect(monkeypatch, "127.0.0.1:6379")
    config = load_config(preset="tiny", overrides={"ray_address": asked})
    assert ray_address(config) == "127.0.0.1:6379"


@pytest.mark.parametrize("asked", ["local", "192.0.2.1:6379", "127.0.0.1:6380"])
def test_an_address_that_names_another_ray_is_one(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    connect(monkeypatch, "127.0.0.1:6379")
    config = load_config(preset="tiny", overrides={"ray_address": asked})
    with pytest.raises(ConfigError, match=f"ray_address = {asked}, but this process is connected"):
        ray_address(config)


def test_a_function_that_a_rank_cannot_import_is_refused_there() -> None:
    script = PickledScript("main", "nanoray.script.program", b"cno_such_module\nmain\n.")
    with pytest.raises(ConfigError, match=r"main cannot be loaded .*No module named 'no_such_mod"):
        script.unpack(print)


def test_a_file_that_fails_on_a_rank_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stands above has run, under another name than `__main__`."""
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    file = ScriptFile("/x/mine.py", b"name = __name__\n\nimport no_such_module\n", None, ["x", "1"])
    assert file.run() == "/x/mine.py:3: ModuleNotFoundError: No module named 'no_such_module'"
    assert (sys.modules["__main__"].name, sys.argv) == ("__mp_main__", ["x", "1"])
    assert not hasattr(multiprocessing.current_process(), "_inheriting")
