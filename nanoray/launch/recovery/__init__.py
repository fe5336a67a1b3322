"""Recovery in place: what a training program of ours adds to place, start, watch and restart.

Its ranks report their steps and hold the run's state, so a lost rank is replaced, or left out, while
the others wait. The files beside this folder, which any program needs, import nothing from here
(tests/unit/test_layers.py).

    driver.py        the loop: situation ─► next step ─► what that step does
    situation.py     which step comes next: a pure function
    run_state.py     where the run is
    watcher.py       what the ranks report, and the orders they get; silence.py, drain.py
    recover.py       new ranks for lost ones; the next group
    worker_group.py  the members of a group, its meeting (meeting.py) and who holds which share
                     (shares.py)
    actors.py        one actor per slot, and spares; worker.py is such an actor
    rank_end.py      how a rank ended; fault_log.py prints and writes it
"""
