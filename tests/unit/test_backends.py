"""Backends by name: gloo, NCCL, and any that a module registers with torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.parallel.backends import load_backend, reports_lost_peers, settings_for_aborts
from nanoray.parallel.rendezvous import RankDevice, choose_backend

OWN = """
import torch.distributed as dist
dist.Backend.register_backend("elsewhere", lambda *args: None, devices=["xpu"])
"""


def test_what_is_wrong_with_a_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_backend_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere cannot be imported here") as error:
        load_backend("nowhere:ccl", "cpu")
    assert "install it on every node, or add its folder to PYTHONPATH" in str(error.value)
    with pytest.raises(ConfigError, match="own_backend_of_a_test registers no ccl with torch"):
        load_backend("own_backend_of_a_test:ccl", "cpu")
    with pytest.raises(
        ConfigError, match="communicates tensors on xpu, and this rank's are on cpu"
    ):
        load_backend("own_backend_of_a_test:elsewhere", "cpu")


@pytest.mark.parametrize("name", ["mpi", "a:b:c", ":ccl", "module:", "my module:ccl"])
def test_a_name_without_its_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is none of auto, nccl, gloo, MODULE:NAME"):
        make_config({"backend": name})


def test_a_backend_of_ones_own_is_chosen_on_any_device() -> None:
    for kind in ("cpu", "cuda"):
        choice = choose_backend([RankDevice(kind, "here", "0")] * 2, "module:ccl", None)
        assert choice == ("module:ccl", "asked for", {})


def test_only_gloo_reports_a_lost_peer() -> None:
    assert reports_lost_peers("gloo")
    for backend in ("nccl", "module:ccl"):
        assert not reports_lost_peers(backend)
        batch = {"micro_batch_size": 4}
        assert not recovers_in_place(make_config(batch), backend, 2)
        aborts = batch | {"abort_nccl": True}
        assert recovers_in_place(make_config(aborts), backend, 2)
        assert not recovers_in_place(make_config(aborts | {"dp_mode": "zero1"}), backend, 2)


def test_an_initialisation_is_given_up_in_time() -> None:
    assert settings_for_aborts(20.4)["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "20"
    assert settings_for_aborts(0.1)["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "1", "0 is none"
