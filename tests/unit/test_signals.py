"""Stop requests: by a signal, by the driver, and once more."""

from __future__ import annotations

import os
import signal

import pytest

from nanoray.launch.signals import Stop, catch_signals
from tests.harness.scripted_ray import ScriptedTime


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_for_a_stop(
    signum: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signum)
    with catch_signals() as stop:
        assert (stop.requested, stop.exit_code) == (False, 0)
        os.kill(os.getpid(), signum)
        assert (stop.requested, stop.exit_code) == (True, code)
    assert signal.getsignal(signum) is before
    assert (
        "stopping after this step, with a checkpoint (Ctrl-C once more: stop now)"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_it_stops_now(first: signal.Signals) -> None:
    def twice() -> None:
        with catch_signals():
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as caught:
        twice()
    assert caught.value.code == 130


def test_another_sigterm_changes_nothing() -> None:
    with catch_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exit_code == 130


def test_a_pause_ends_with_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    time, stop = ScriptedTime(), Stop()
    stop.wait(30.0, time)
    assert time.now - time.began == pytest.approx(30.0, abs=0.2)
    time.after(3.0, lambda: stop.request("node 1 is being drained"))
    stop.wait(30.0, time)
    assert time.now - time.began == pytest.approx(33.0, abs=0.2)
    assert (stop.exit_code, stop.reason) == (143, "node 1 is being drained")
    assert (
        "stop     node 1 is being drained: stopping after this step, with a checkpoint"
        in capsys.readouterr().out
    )
