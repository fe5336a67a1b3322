"""After the loss of a rank: bring the replicas that rarely communicate together again.

    replica 0   step 17 ─────────────► 18 ─┐          behind: does its own steps up to the furthest
    replica 1   step 18 ──────────────────┤          the furthest: rank `source` is one of its ranks
    replica 2   lost ─► state of `source` ─┘          counts in the average from the next round on

No replica takes over weights of another one, unless all of its ranks are lost. A rank of a replica
that is left takes the state of the others of its replica, which loses nothing. What one replica has
finished of a round, the mean that all have, the others take from it.
"""

from __future__ import annotations

from dataclasses import asdict

from nanoray.mesh.mesh import Mesh
from nanoray.state.train_state import Scalars, Session, TrainState, fetch

Place = tuple[int, int, tuple[int, ...]]  # a rank's replica, its step (-1: it is new), its rounds


def rejoin(state: TrainState, mesh: Mesh, source: int) -> int:
    """Give each rank a state; return the step up to which replicas must train alone. (all ranks)

    Of whole models. `source` is the rank with the most completed steps.
    """
    assert state.outer
    is_new = not state.whole
    own: Place = (state.outer.replica, -1 if is_new else state.step, state.rounds)
    places: list[Place] = mesh.all_gather(own)

    # Each replica's ranks take the state of the most advanced of them.
    orphans = []  # replicas of which no rank is left
    for replica in sorted({place[0] for place in places}):
        members = [rank for rank, place in enumerate(places) if place[0] == replica]
        best = max(members, key=lambda rank: places[rank][1:])
        if places[best][1] < 0:
            orphans.append(replica)
            continue
        behind = [rank for rank in members if places[rank][1:] != places[best][1:]]
        if behind:
            packed, _ = fetch(state, mesh, best)
            if mesh.rank in behind:
                state.load(packed)
                own = (replica, *places[best][1:])

    # A replica that is lost as a whole begins anew from the furthest one. Others take from it the
    # rounds that it has finished and they have not.
    finished = places[source][2]
    lack_rounds = [rank for rank, place in enumerate(places) if place[2] < finished]
    if orphans or lack_rounds:
        packed, _ = fetch(state, mesh, source)
        if state.outer.replica in orphans:
            state.load(packed)
            state.outer.joined = state.step
        elif own[2] < finished:
            state.follow(packed)

    # Where all that had begun a round are lost, the source's replica stands for them.
    of_ranks = mesh.all_gather(state.outer.counting)
    has_all = all(any(of_fragment) for of_fragment in zip(*of_ranks, strict=True))
    if not has_all and state.outer.replica == places[source][0]:
        state.outer.stand_in()

    # Small values in one message: what has been reported and saved of the furthest step.
    values = (asdict(state.session), asdict(state.scalars), state.step)
    session, scalars, front = mesh.broadcast(values, source)
    state.session = Session(**session)
    state.scalars = Scalars(**scalars)
    state.whole = True
    return front
