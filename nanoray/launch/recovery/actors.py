"""The actors of a run on Ray: one per slot, and spares without a slot.

A slot is the place of a rank: its resources, its device, its log. When a rank is lost, a spare or a
new actor takes its slot.

    create ─► slot 0, slot 1, ... ─► fill: end the actor in a slot, put a spare or a new one there
              spares                 vacate: end the actor in a slot, leave the slot empty
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
)

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.config.variables import THREADS, explicit
from nanoray.launch.connection import bounded
from nanoray.launch.placement import START_TIMEOUT_S, Placement, nodes_of, strategy
from nanoray.launch.ray_compat import is_pending
from nanoray.launch.recovery.cluster_watch import ClusterWatch
from nanoray.launch.recovery.pickled_script import PickledScript
from nanoray.launch.recovery.worker import Worker
from nanoray.machine.output import say

POLL_S = 0.25  # how often the driver looks for a stop request while it waits for actors
START_TRIES = 3  # how often a new actor may die before it is ready
# Ray starts a process within seconds where its slot has room. Each further try waits twice as long:
# on a very busy machine a process may be slow.
PENDING_S = 20.0
ANSWER_S = 2.0  # a process that is not frozen answers on its control thread in milliseconds
SPARES_LOOK_S = 2.0  # between two looks at the nodes of the spares: each is a question to the head


class Spare(NamedTuple):
    """An actor without a slot."""

    actor: Any
    ready: Any  # its pending `ready`
    node: str  # to which it is bound


def _no_check() -> None:
    """Interrupt nothing."""


class ActorPool:
    """The actors by slot, the spares, and what is known of their processes."""

    def __init__(
        self,
        spec: RunSpec,
        place: Placement,
        check: Callable[[], None] = _no_check,
        cluster: ClusterWatch | None = None,
        script: PickledScript | None = None,
        api: Any = ray,
        clock: Any = time,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Take a placement; nothing is created yet.

        check: called while actors start; what it raises interrupts the wait. cluster: which nodes
        are drained, and whether there is a head to create or end an actor. script: what each rank
        runs in place of the recipe. variables: of each rank's environment.
        """
        self.spec = spec
        self.place = place
        self.cluster = cluster
        self.api = api
        self.clock = clock
        self._check = check
        self._script = script
        self.variables = dict(variables or {})

        # All by slot. facts: pid, start, node, ip, actor, devices.
        self.actors: dict[int, Any] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.starting: dict[int, Any] = {}  # the pending facts of new actors
        # When each of those was requested (monotonic seconds), and how long to wait for its process.
        self._requested: dict[int, tuple[float, float]] = {}
        self.failed_starts: Counter[int] = Counter()  # in a row, of new actors
        self.unfit: dict[int, set[str]] = {}  # nodes on which a new rank could not work

        # Actors without a slot.
        self.spares: list[Spare] = []
        self._spares_due_at = 0.0  # monotonic seconds of the next look at their nodes
        # Node -> spares that died there before they were ready, or for which it had no memory
        self._failed_spares: Counter[str] = Counter()
        self.promoted: set[int] = set()  # slots that a spare took since the last fault

        # Two runs of one name on a cluster must not see each other's actors, nor those of a program
        # whose connection they share.
        self._namespace = f"nanoray-{secrets.token_hex(4)}"
        self._former: list[Any] = []  # lost ranks' actors that could not be ended at once
        self._created = 0  # actors so far, to give each its own name

    # Create and end actors.

    def create(self) -> None:
        """Create one actor per slot, named by run and rank. Raises RayError, GetTimeoutError."""
        for slot in range(self.place.workers):
            # The position that an older attempt wrote means nothing now.
            self.spec.progress(slot).unlink(missing_ok=True)
            self.fill(slot)
        if len(self.starting) < self.place.workers:
            raise RayError("the cluster's head does not answer")

        timeout_s = start_timeout_s(self.spec.config)
        if self.cluster:
            # A bundle on a drained node moves only when that node is gone.
            timeout_s += self.cluster.vacated_in_s
        facts = self._facts_of_new_actors(timeout_s)
        self.facts = dict(zip(self.starting, facts, strict=True))
        self.starting.clear()

    def _facts_of_new_actors(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what the actors of all slots say of themselves. Raises RayError, GetTimeoutError.

        In a restart a node may leave while they start, and Ray lose the request for a process. At
        the start of a run a process may take longer than that is waited for.
        """
        is_restart = self.spec.attempt > 0
        deadline = self.clock.monotonic() + timeout_s
        while is_restart and deadline - self.clock.monotonic() > PENDING_S:
            with suppress(GetTimeoutError):
                return self.wait_for(list(self.starting.values()), PENDING_S)
            self.request_again()
        return self.wait_for(list(self.starting.values()), deadline - self.clock.monotonic())

    def wait_for(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """Return all values, calling `check` meanwhile. Raises RayError, GetTimeoutError."""
        deadline = self.clock.monotonic() + timeout_s
        pending = refs
        while pending:
            self._check()
            remaining_s = max(0.0, deadline - self.clock.monotonic())
            done, pending = self.api.wait(
                pending, num_returns=len(pending), timeout=min(POLL_S, remaining_s)
            )
            # Raise the error of a dead actor now, not when all others have answered.
            self.api.get(done)
            if pending and not remaining_s:
                raise GetTimeoutError(f"no answer within {timeout_s:g} s")
        return list(self.api.get(refs))

    def fill(self, slot: int, head_answers: bool | None = None) -> None:
        """Put a spare or a new actor into a slot, and end the actor that is there, if any.

        Without a head the slot stays empty. head_answers: None if that is not known yet.
        """
        if head_answers is None:
            head_answers = self.head_answers()
        self.vacate(slot, head_answers)
        if not head_answers:
            return

        self._requested[slot] = (self.clock.monotonic(), PENDING_S)
        spare = self._take_spare(slot)
        if spare is not None:
            self.actors[slot] = spare
            self.promoted.add(slot)
            devices = self.facts[slot]["devices"]
            self.starting[slot] = spare.take_slot.remote(slot, devices, self.spec.progress(slot))
            return

        replaces = bool(self.facts)
        actor = self.new_actor(
            slot,
            # With shrink the others train meanwhile, so a new actor has the time to rehearse a step;
            # otherwise they wait for it.
            rehearse=replaces and self.spec.config.recovery == "shrink",
            num_cpus=self.place.bundle["CPU"],
            num_gpus=self.place.bundle.get("GPU", 0),
            scheduling_strategy=self._strategy(slot),
        )
        self.actors[slot] = actor
        # `ready` returns after the imports: an actor that dies in them costs another try, but no
        # rendezvous. At the start of a run all ranks import at once, and `describe` is enough: who
        # they are must be known before one of them dies.
        self.starting[slot] = actor.ready.remote() if replaces else actor.describe.remote()

    def request_again(self) -> None:
        """Create the actors again for which Ray starts no process, and print a line for each.

        Ray 2.60 may lose the request for a process when a node leaves at that moment: the slot's
        bundle is reserved on a living node, and the actor waits there for ever.
        """
        now = self.clock.monotonic()
        for slot in list(self.starting):
            requested_at, patience_s = self._requested[slot]
            if now < requested_at + patience_s:
                continue
            # Whatever is found, the next look comes after as long a wait: a frozen head takes seconds.
            self._requested[slot] = (now, patience_s)
            if not self.head_answers() or not is_pending(self.api, self.actors[slot]):
                continue
            # Without a reserved bundle it waits for a node, rightly.
            if self.place.reserved_on(self.api):
                self.fill(slot)
                self._requested[slot] = (now, 2 * patience_s)
                say(
                    f"replace  Ray has room for rank {slot} and starts no process there; asking again"
                )

    def vacate(self, slot: int, head_answers: bool | None = None) -> None:
        """Leave a slot empty. Without a head its actor, if it lives, ends with the run."""
        self.starting.pop(slot, None)
        self.promoted.discard(slot)
        actor = self.actors.pop(slot, None)
        if actor is None:
            return
        if head_answers is None:
            head_answers = self.head_answers()
        if head_answers:
            self.kill(actor)
        else:
            self._former.append(actor)

    def head_answers(self) -> bool:
        """Return whether the head answers: without one, creating or ending an actor never ends."""
        return self.cluster is None or self.cluster.head_answers()

    def new_actor(self, slot: int | None, rehearse: bool, **options: Any) -> Any:
        """Create a Worker on Ray for a slot, or a spare (`slot` None)."""
        # A runtime_env costs half a second, because Ray cannot use its prestarted workers then. The
        # network's variables travel in the Rendezvous. Variables whose value is in the configuration
        # travel here, so that the process starts with them. Those of the driver's shell may be
        # secrets, which Ray's dashboard must not show.
        given = explicit(self.spec.config.env)
        runtime_env = {"env_vars": given} if given else None
        remote: Any = self.api.remote(concurrency_groups={"control": 1, "heartbeat": 1})(Worker)
        # A script makes its model itself, when it trains.
        rehearse = rehearse and self.spec.config.model != "own"
        rehearsal = self.spec.to_dict() if rehearse else None
        record = None if slot is None else self.spec.progress(slot)
        return remote.options(
            name=self._next_name(slot),
            namespace=self._namespace,
            runtime_env=runtime_env,
            max_restarts=0,  # Ray would re-execute silently; the driver decides
            max_task_retries=0,
            **options,
        ).remote(self.spec.folder.name, slot, rehearsal, self._script, self.variables, record)

    def _next_name(self, slot: int | None) -> str:
        """Return a name that no actor of this run has had, e.g. `run-rank1.0-2`."""
        role = "spare" if slot is None else f"rank{slot}"
        name = f"{self.spec.folder.name}-{role}"
        # The first actors of a run have the plain name; later ones attempt and number.
        number = max(0, self._created - self.place.workers + 1)
        if self.spec.attempt or number:
            name += f".{self.spec.attempt}"
        if number:
            name += f"-{number}"
        self._created += 1
        return name

    def kill(self, actor: Any) -> None:
        """End an actor. Without a head that never returns, so a thread does it."""
        bounded(lambda: self.api.kill(actor))

    def end(self) -> None:
        """End every actor. Their outcomes are on disk or in the driver already."""

        def kill_all() -> None:
            spares = [spare.actor for spare in self.spares]
            for actor in [*self.actors.values(), *self._former, *spares]:
                self.api.kill(actor)

        bounded(kill_all)

    @property
    def threads(self) -> int:
        """Return the threads of each rank: those that the user asks for, or its share of CPUs."""
        return int(self.variables.get(THREADS, self.place.threads))

    # Where actors go.

    def _strategy(self, slot: int) -> Any:
        """Return where an actor goes: to the slot's bundle, or off an unfit or drained node."""
        bundle = self.place.order[slot]
        avoided = set(self.unfit.get(slot, ()))
        if self.cluster:
            avoided |= self.cluster.avoided(bundle)
        if avoided:
            return NodeLabelSchedulingStrategy(hard={"ray.io/node-id": NotIn(*sorted(avoided))})
        return strategy(self.place.group, bundle)

    def refused_everywhere(self, slot: int) -> bool:
        """Return whether new ranks in this slot could not work on START_TRIES nodes."""
        return len(self.unfit.get(slot, ())) >= START_TRIES

    @property
    def drained_nodes(self) -> Collection[str]:
        return self.cluster.draining if self.cluster else ()

    # Spares.

    def add_spares(self, count: int) -> None:
        """Start the spares that are missing of `count`: processes that hold no device.

        None any more after START_TRIES that failed: where there is no memory for a spare, the kernel,
        or Ray's memory monitor, ends ranks, too.

        On CPUs they rehearse a step. On GPUs they must not: a backward pass would fix for the whole
        process that it has no GPU.
        """
        now = self.clock.monotonic()
        if not count or now < self._spares_due_at or not self.head_answers():
            return
        self._spares_due_at = now + SPARES_LOOK_S
        nodes = [node for node in nodes_of(self.api) if node["id"] not in self.drained_nodes]
        self._drop_lost_spares({node["id"] for node in nodes})

        while len(self.spares) < count and self._failed_spares.total() < START_TRIES:
            node = self._node_for_spare(nodes)
            if not node or not self._has_memory(node):
                break
            # Ray places an actor that asks for nothing on a random node, unless its affinity is
            # hard: then it ends with that node, or fails to start there, and the next look sees it.
            spare = self.new_actor(
                None,
                rehearse=self.place.kind == "cpu",
                num_cpus=0,
                num_gpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self.spares.append(Spare(spare, spare.ready.remote(), node))

    def _drop_lost_spares(self, nodes: Collection[str]) -> None:
        """Forget the spares that died; end those that are on none of these nodes.

        A drained node ends, and its pod is replaced, when no process of ours is there any more.
        """
        for spare in list(self.spares):
            if spare.node not in nodes:
                self.kill(spare.actor)
                self.spares.remove(spare)
                continue
            done, _ = self.api.wait([spare.ready], timeout=0)
            try:
                if done:
                    self.api.get(spare.ready)
            except RayError as error:
                self.spares.remove(spare)
                self._note_failed_spare(spare.node, first_line(error))

    def _note_failed_spare(self, node: str, why: str) -> None:
        """Count a spare that could not start, and print a line once there will be no more."""
        self._failed_spares[node] += 1
        if self._failed_spares.total() == START_TRIES:
            say(f"spare    {START_TRIES} could not start, and no more are started: {why}")

    def _has_memory(self, node: str) -> bool:
        """Return whether a node has as much memory free as a rank takes there, as that rank says.

        Ranks reserve no memory with Ray, so it does not know.
        """
        slots = [slot for slot in self.ready if self.facts[slot]["node"] == node]
        if not slots:
            return True
        try:
            taken, free = self.api.get(self.actors[slots[0]].memory.remote(), timeout=ANSWER_S)
        except RayError:  # the rank is lost or frozen: this is no time for a spare
            return False
        if taken > free:
            free_mib, taken_mib = free / 2**20, taken / 2**20
            why = f"node {node[:8]} has {free_mib:.0f} MiB free, and a rank takes {taken_mib:.0f}"
            self._note_failed_spare(node, why)
        return bool(taken <= free)

    def _node_for_spare(self, nodes: list[dict[str, Any]]) -> str:
        """Return which of these nodes with ranks has the fewest spares; "" if none has ranks.

        Those where a spare could not start come last.
        """
        with_ranks = {facts["node"] for facts in self.facts.values()}
        names = [node["id"] for node in nodes if node["id"] in with_ranks]
        spares = Counter(spare.node for spare in self.spares)
        return min(names, key=lambda name: (self._failed_spares[name], spares[name]), default="")

    def _take_spare(self, slot: int) -> Any:
        """Take a ready spare that fits a slot from the spares; None if there is none."""
        for spare in list(self.spares):
            try:
                done, _ = self.api.wait([spare.ready], timeout=0)
                lost = self.facts.get(slot)
                if not done or lost is None:
                    continue
                node = self.api.get(spare.ready)["node"]
                if node in self.drained_nodes:
                    continue
                # The slot's device is on the node of the lost actor.
                if self.place.kind != "cpu" and node != lost["node"]:
                    continue
                self._remove_spare(spare)
                return spare.actor
            except RayError:  # it died in its imports; the next look forgets it
                continue
        return None

    def _remove_spare(self, spare: Spare) -> None:
        """Forget a spare; `add_spares` starts another one at once."""
        self.spares.remove(spare)
        self._spares_due_at = 0.0

    # What is known of actors.

    def take_facts(self, slot: int) -> RayError | None:
        """Store the facts that a new actor returned; return the error of one that died."""
        try:
            self.facts[slot] = self.api.get(self.starting.pop(slot))
        except RayError as error:
            return error
        return None

    @property
    def ready(self) -> list[int]:
        """Return the slots whose actor has started, with or without the run's state in memory."""
        return sorted(slot for slot in self.actors if slot not in self.starting)


def first_line(error: RayError) -> str:
    """Return what Ray says first; more lines have ids, and what may end a process in general."""
    return str(error).strip().partition("\n")[0][:200]


def start_timeout_s(config: Config) -> float:
    """Return how long actors may take to start.

    If a node is lost, a slot waits for another node: as long as at placement.
    """
    return max(START_TIMEOUT_S, config.placement_timeout_s)
