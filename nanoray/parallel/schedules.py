"""The order in which the stages of a pipeline work, as data: ranks, dry runs and tests read
one timetable.

A turn is the forward (F) or backward (B) of one micro batch through one chunk of layers; in
zero_bubble B computes what the stage before waits for, and W the gradients of weights. Time goes to
the right, a column is a turn, and · is a stage that waits. Four stages, four micro batches:

    gpipe           F0 F1 F2 F3  ·  ·  ·  ·  ·  · B0 B1 B2 B3      all forwards, then all backwards: keeps every
                     · F0 F1 F2 F3  ·  ·  ·  · B0 B1 B2 B3  ·      micro batch's activations
                     ·  · F0 F1 F2 F3  ·  · B0 B1 B2 B3  ·  ·
                     ·  ·  · F0 F1 F2 F3 B0 B1 B2 B3  ·  ·  ·

    1f1b            F0 F1 F2 F3  ·  ·  · B0  · B1  · B2  · B3      as soon as a backward can run, it does: the same
                     · F0 F1 F2  ·  · B0 F3 B1  · B2  · B3  ·      bubble, but stage p keeps pp - p micro batches
                     ·  · F0 F1  · B0 F2 B1 F3 B2  · B3  ·  ·
                     ·  ·  · F0 B0 F1 B1 F2 B2 F3 B3  ·  ·  ·

    zero_bubble     F0 F1 F2 F3  ·  ·  · B0 W0 B1 W1 B2 W2 B3 W3   stage p puts off its W by p micro batches: they fill
                     · F0 F1 F2  ·  · B0 F3 B1 W0 B2 W1 B3 W2 W3   the time after its last F, and every stage keeps the
                     ·  · F0 F1  · B0 F2 B1 F3 B2 W0 B3 W1 W2 W3   inputs of pp micro batches
                     ·  ·  · F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3

    interleaved     rank r holds the chunks r, r + pp, r + 2·pp, ... of the layers: with v chunks the bubble is 1/v as
                    long, and v times as much travels

With m micro batches a rank waits for (pp - 1)/(v·m + pp - 1) of the time, however long a backward
takes; in zero_bubble for (pp - 1)/(3·m + pp - 1), if F, B and W take equally long and there are as
many micro batches as stages. Source: Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream;
Narayanan et al. 2021, Megatron-LM (interleaved); Qi et al. 2023, Zero Bubble Pipeline Parallelism
(ZB-H1).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Turn(NamedTuple):
    """What a rank computes without a pause, for one micro batch and one chunk of layers.

    op: forward ("F") or backward ("B", and in zero_bubble "W").
    """

    op: str
    chunk: int
    micro: int


class Message(NamedTuple):
    """A tensor that one stage's turn makes and another stage's turn needs."""

    source: int  # stages of the pp axis
    target: int
    turn: Turn  # the one that needs it, on the target


Row = tuple[Turn | None, ...]  # by stage: the turns that begin in one tick
ALIKE = {"F": 1, "B": 1, "W": 1}
USUAL = {"F": 1, "B": 2}  # a backward computes two products for each one of the forward
HALVES = ALIKE  # of which B is one, and W the other


def turns(kind: str, pp: int, stage: int, micro: int, chunks: int = 1) -> list[Turn]:
    """Return the order in which one stage works.

    Raises ValueError for a kind, or sizes, that have no schedule.
    """
    if kind == "interleaved":
        return _interleaved(pp, stage, micro, chunks)
    if kind not in SCHEDULES or chunks != 1:
        raise ValueError(f"no schedule {kind} with {chunks} chunks")
    if kind == "zero_bubble":
        return _zero_bubble(pp, stage, micro)

    # Before the first backward can come, gpipe runs all forwards. In 1f1b a stage runs one for each
    # stage after it. Then forwards and backwards take turns.
    ahead = micro if kind == "gpipe" else min(micro, pp - 1 - stage)
    order = [Turn("F", 0, k) for k in range(ahead)]
    for k in range(micro):
        if ahead + k < micro:
            order.append(Turn("F", 0, ahead + k))
        order.append(Turn("B", 0, k))
    return order


def _interleaved(pp: int, stage: int, micro: int, chunks: int) -> list[Turn]:
    """Return the order in which micro batches go in groups of pp.

    A group passes all chunks of a rank before the next group comes.
    """
    if micro % pp:
        raise ValueError(f"{micro} micro batches are no groups of {pp}")

    def nth(op: str, i: int) -> Turn:
        """Return a rank's i-th forward or backward; backwards pass the chunks in reverse."""
        group, place = divmod(i, pp * chunks)
        chunk = place // pp
        if op == "B":
            chunk = chunks - 1 - chunk
        return Turn(op, chunk, group * pp + place % pp)

    # As 1f1b: forwards that come before the first backward, then one of each in turns, then the
    # backwards that are left.
    total = micro * chunks
    ahead = min(total, 2 * (pp - 1 - stage) + (chunks - 1) * pp)
    order = [nth("F", i) for i in range(ahead)]
    for i in range(total - ahead):
        order.append(nth("F", ahead + i))
        order.append(nth("B", i))
    for i in range(total - ahead, total):
        order.append(nth("B", i))
    return order


def _zero_bubble(pp: int, stage: int, micro: int) -> list[Turn]:
    """Return the order of 1f1b, with the W of `stage` micro batches before behind each B."""
    ahead = min(micro, pp - 1 - stage)
    order = [Turn("F", 0, k) for k in range(ahead)]
    for k in range(micro):
        if ahead + k < micro:
            order.append(Turn("F", 0, ahead + k))
        order.append(Turn("B", 0, k))
        if k >= stage:
            order.append(Turn("W", 0, k - stage))

    # The W that are left fill the time in which earlier stages still run backwards.
    for k in range(max(0, micro - stage), micro):
        order.append(Turn("W", 0, k))
    return order


def last_half(kind: str) -> str:
    """Return the turn after which a micro batch's gradients of a chunk are complete.

    Afterwards nothing of the micro batch is kept.
    """
    return "W" if kind == "zero_bubble" else "B"


def needed(turn: Turn, stage: int, pp: int, chunks: int) -> tuple[int, Turn] | None:
    """Return the stage and the turn there whose result a turn needs; None: it needs only the data.

    The layers of a turn are those of part chunk·pp + stage, of pp·chunks parts.
    """
    part = turn.chunk * pp + stage
    last = pp * chunks - 1

    # What this stage itself has computed before, or the data.
    if turn.op == "W":
        return stage, Turn("B", turn.chunk, turn.micro)
    if turn.op == "B" and part == last:
        return stage, Turn("F", turn.chunk, turn.micro)
    if turn.op == "F" and part == 0:
        return None

    # The stream comes from the part before, its gradient from the part after.
    neighbour = part - 1 if turn.op == "F" else part + 1
    chunk, other_stage = divmod(neighbour, pp)
    return other_stage, Turn(turn.op, chunk, turn.micro)


def timetable(
    kind: str, pp: int, micro: int, chunks: int = 1, cost: Mapping[str, int] = ALIKE
) -> list[Row]:
    """Return what each stage begins in each tick, if a turn takes `cost` ticks and messages no time.

    Each stage keeps to its order, and begins a turn as soon as it can. Raises ValueError when some
    never can.
    """
    todo = [turns(kind, pp, stage, micro, chunks) for stage in range(pp)]
    position = [0] * pp  # by stage: its next turn
    free = [0] * pp  # by stage: the tick in which it can begin another turn
    done: dict[tuple[int, Turn], int] = {}  # the tick at whose beginning a result is there
    table: list[Row] = []

    def can_begin(stage: int, now: int) -> Turn | None:
        """Return the next turn of a stage if it can begin now."""
        if position[stage] == len(todo[stage]) or free[stage] > now:
            return None
        turn = todo[stage][position[stage]]
        need = needed(turn, stage, pp, chunks)
        if need is not None and done.get(need, now + 1) > now:
            return None
        return turn

    while any(position[s] < len(todo[s]) for s in range(pp)) or len(table) < max(free):
        # All stages decide before any of them begins: no result arrives in its own tick.
        now = len(table)
        row = tuple(can_begin(stage, now) for stage in range(pp))
        for stage, turn in enumerate(row):
            if turn is not None:
                free[stage] = now + cost[turn.op]
                done[stage, turn] = free[stage]
                position[stage] += 1
        if max(free) <= now:  # nothing runs, so nothing will ever arrive
            raise ValueError(f"{kind} of {pp} stages and {micro} micro batches never ends")
        table.append(row)
    return table


def messages(table: list[Row], pp: int, chunks: int = 1) -> list[list[Message]]:
    """Return what travels between stages at the end of each tick, for turns of one tick each."""
    # By the turn that makes it: who needs it, on another stage.
    wanted: dict[tuple[int, Turn], Message] = {}
    for row in table:
        for stage, turn in enumerate(row):
            need = None if turn is None else needed(turn, stage, pp, chunks)
            if turn is not None and need is not None and need[0] != stage:
                wanted[need] = Message(need[0], stage, turn)

    # It leaves in the tick in which it is made.
    leaving = []
    for row in table:
        made = [(stage, turn) for stage, turn in enumerate(row) if turn is not None]
        leaving.append([wanted[result] for result in made if result in wanted])
    return leaving


def bubble(
    kind: str, pp: int, micro: int, chunks: int = 1, cost: Mapping[str, int] | None = None
) -> float:
    """Return the share of the time from the first to the last turn in which a stage waits.

    The mean over stages. cost: the ticks of each turn; None: those of USUAL, or of HALVES.
    """
    in_halves = last_half(kind) == "W"
    if cost is None:
        cost = HALVES if in_halves else USUAL
    ops = "FBW" if in_halves else "FB"
    work = micro * chunks * sum(cost[op] for op in ops)
    return 1 - work / len(timetable(kind, pp, micro, chunks, cost))


def waited(kind: str, pp: int, micro: int, chunks: int = 1) -> float:
    """Return how long a stage waits in a step, in units of one micro batch's forward and backward."""
    if kind != "zero_bubble":
        return (pp - 1) / chunks
    if micro >= pp:
        return (pp - 1) / 3

    # With fewer micro batches than stages there are too few W to fill the bubble.
    share = bubble(kind, pp, micro)
    return micro * share / (1 - share)


@cache  # a search over layouts asks the same for each size of the other axes
def in_flight(kind: str, pp: int, stage: int, micro: int, chunks: int = 1) -> tuple[int, ...]:
    """Return for each chunk of a stage how many micro batches' activations it keeps at its peak.

    The peak is that of all chunks together. In zero_bubble a micro batch counts until its W, though
    after its B only the inputs of linear layers are left.
    """
    kept = [0] * chunks
    peak = [0] * chunks
    for turn in turns(kind, pp, stage, micro, chunks):
        if turn.op == "F":
            kept[turn.chunk] += 1
        elif turn.op == last_half(kind):
            kept[turn.chunk] -= 1
        if sum(kept) > sum(peak):
            peak = kept.copy()
    return tuple(peak)
