"""The connection to Ray: a local one that does not start, and the watch over the head."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoray.errors import PlacementError
from nanoray.launch import connection
from nanoray.launch.connection import connected
from nanoray.launch.placement import Placement
from nanoray.launch.recovery.cluster_watch import HEAD_TIMEOUT_S, LEAVE_S, ClusterWatch
from nanoray.machine.slots import local_slots
from tests.harness.scripted_ray import ScriptedTime

# A local Ray.


def test_a_local_ray_that_does_not_start_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's own error has the traceback of its dashboard; some of Ray's are a bare Exception."""
    ends: list[str] = []

    def init(address: str, **options: Any) -> Any:
        assert options["_temp_dir"].startswith(str(tmp_path))
        raise Exception(
            "The last 20 lines of dashboard.log:\n  import x\nTypeError: of a docstring\n"
        )

    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.setattr(connection.ray, "shutdown", lambda: ends.append("shutdown"))
    monkeypatch.setattr(connection.os, "access", lambda *_: False)  # no folder in /tmp
    monkeypatch.setattr(connection.tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(PlacementError) as error,
        connected("local", local_slots("cpu", 2, [], 2.0)),
    ):
        pass
    expected = "a local Ray did not start: TypeError: of a docstring; train without Ray"
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)
    assert (ends, list(tmp_path.iterdir())) == (["shutdown"], []), "nothing is left"


def test_the_ray_of_the_calling_program_is_used_and_stays_connected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: True)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(connection.ray, name, lambda **_: pytest.fail("it has a Ray"))
    with connected("127.0.0.1:6379", None):
        pass
    assert "the one that this program is connected to, at 127.0.0.1:6379" in capsys.readouterr().out


# The watch over the head.


def watch(
    clock: ScriptedTime,
) -> tuple[ClusterWatch, socket.socket, dict[str, int], dict[str, float]]:
    """A watch over a head that listens, a run on node1 and node2 with a driver on node0, and node3
    without it.
    """
    head, draining, free = (
        socket.create_server(("127.0.0.1", 0)),
        dict[str, int](),
        {"node2": 5.0, "node3": 0.0},
    )
    address = f"127.0.0.1:{head.getsockname()[1]}"
    state = SimpleNamespace(
        state=SimpleNamespace(get_draining_nodes=lambda: draining),
        available_resources_per_node=lambda: {node: {"CPU": cpus} for node, cpus in free.items()},
    )
    gcs = SimpleNamespace(internal_kv_get=lambda *_: b"")
    api = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(
            gcs_address=address, get_node_id=lambda: "node0"
        ),
        util=SimpleNamespace(
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "node1", 1: "node2"}}
        ),
        nodes=lambda: [
            {"NodeID": n, "NodeManagerAddress": "", "Resources": {}, "Alive": True} for n in free
        ],
        _private=SimpleNamespace(
            state=state, worker=SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs))
        ),
    )
    place = Placement(None, "cpu", {"CPU": 1.0}, (0, 1))  # type: ignore[arg-type]
    return ClusterWatch(place, api, clock), head, draining, free


def test_a_head_that_is_gone_is_known_at_once_and_reported_after_a_while() -> None:
    clock = ScriptedTime()
    cluster, head, _, _ = watch(clock)
    with cluster:
        clock.sleep(10.0)
        cluster.check()
        assert cluster.head_answers()
        head.close()
        assert not cluster.head_answers()
        clock.sleep(HEAD_TIMEOUT_S - 1)
        cluster.check()
        assert cluster.trouble() is None
        clock.sleep(2.0)
        assert cluster.trouble() == "the cluster's head has not answered for 15 s"
        cluster.head_timeout_s = 300.0  # with GCS fault tolerance
        assert cluster.trouble() is None
        cluster._answered_at -= 300.0 - HEAD_TIMEOUT_S
        assert cluster.trouble() == "the cluster's head has not answered for 300 s"


def test_a_frozen_head_is_reported() -> None:
    """The kernel accepts connections for it."""
    clock = ScriptedTime()
    cluster, head, _, _ = watch(clock)

    def frozen(*_: Any) -> bytes:
        raise TimeoutError

    with cluster, head:
        assert cluster.head_answers()
        cluster._api._private.worker.global_worker.gcs_client.internal_kv_get = frozen
        clock.sleep(HEAD_TIMEOUT_S + 1)
        cluster.check()
        assert cluster.trouble() == "the cluster's head has not answered for 15 s"


def test_another_head_in_the_place_of_the_old_one_is_asked_nothing_more() -> None:
    """Ray aborts a driver whose question about drained nodes such a head refuses."""
    cluster, head, draining, _ = watch(ScriptedTime())

    def refuse(*_: Any) -> bytes:
        raise RuntimeError(
            "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted."
        )

    with cluster, head:
        assert cluster.head_answers()
        cluster._api._private.worker.global_worker.gcs_client.internal_kv_get = refuse
        cluster._api._private.state.state.get_draining_nodes = lambda: pytest.fail(
            "Ray aborts here"
        )
        draining["node0"] = 0
        cluster.check()
        assert cluster.replaced
        assert cluster.head_lost
        assert not cluster.head_answers()
        assert (
            cluster.trouble()
            == "another head has taken the place of the cluster's head, and does not know this run"
        )
        assert not cluster.draining


def test_only_a_drain_of_the_drivers_node_is_trouble() -> None:
    cluster, head, draining, _ = watch(ScriptedTime())
    with cluster, head:
        draining |= {"node2": 0, "node9": 0}
        cluster.check()
        assert cluster.trouble() is None
        draining["node0"] = 0
        cluster.check()
        assert cluster.trouble() == "the driver's node node0 is being drained"
        draining["node0"] = 1
        cluster.check()
        assert cluster.trouble() == "the driver's node node0 is being drained, 0 s left"


def test_ranks_leave_a_drained_node_when_others_have_room_or_time_is_short() -> None:
    cluster, head, draining, free = watch(ScriptedTime())

    def notice(left_s: float | None) -> None:
        draining["node2"] = int(1e3 * (time.time() + left_s)) if left_s else 0
        cluster.check()

    with cluster, head:
        notice(None)
        assert not cluster.should_leave(["node2"], save_first=False), (
            "its own free CPUs are no room"
        )
        notice(LEAVE_S + 5)
        assert not cluster.should_leave(["node2"], save_first=False)
        assert cluster.should_leave(["node2"], save_first=True), (
            "a checkpoint takes longer than a step"
        )
        assert cluster.vacated_in_s == pytest.approx(LEAVE_S + 5, abs=1.0)
        assert cluster.avoided(1) == set(), "a new actor waits in its bundle"
        notice(LEAVE_S - 1)
        assert cluster.should_leave(["node2"], save_first=False)
        notice(None)
        assert cluster.vacated_in_s == 0.0
        free["node3"] = 1.0
        cluster.check()
        assert cluster.should_leave(["node2"], save_first=False)
        assert not cluster.should_leave(["node2", "node2"], save_first=False), (
            "there is room for one"
        )
        assert cluster.avoided(0) == set(), "its bundle is on a node that stays"
        assert cluster.avoided(1) == {"node2"}
        assert cluster.avoided(1) == set(), "the room is taken"
