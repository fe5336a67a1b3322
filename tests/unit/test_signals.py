"""Stop requests: by a signal, by the driver, and once more."""

from __future__ import annotations

import os
import signal

import pytest

from nanoray.cli import STOP_SIGNALS, stop_signals
from nanoray.launch.signals import Stop, catch_signals
from nanoray.parallel.rendezvous import Order
from nanoray.train.__main__ import StopSignals


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
        "stopping after this step; what is done is saved (Ctrl-C once more: stop now)"
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


@pytest.mark.parametrize("ends_process", [False, True])
def test_without_ray_the_programs_own_handlers_are_restored(ends_process: bool) -> None:
    """A notebook's next cell can be interrupted, and a second Ctrl-C does not end the kernel."""
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    stop = StopSignals(ends_process)
    with stop_signals(stop):
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.wanted(), stop.exit_code) == (Order.STOP, 130)
        if not ends_process:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_a_stop_of_the_driver_itself_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stop = Stop()
    stop.request("node 1 is being drained")
    assert (stop.exit_code, stop.reason) == (143, "node 1 is being drained")
    assert (
        "stop     node 1 is being drained: stopping after this step; what is done is saved"
        in capsys.readouterr().out
    )
