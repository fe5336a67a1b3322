"""The order in which the stages of a pipeline work, as data: ranks, simulator, drawing and tests
read one timetable.

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
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Turn(NamedTuple):
    """What a rank computes without a pause: forward ("F") or backward ("B", "W") of a micro batch
    through a chunk.
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
    """Return the order in which one stage works. Raises ValueError for a kind, or sizes, that there
    is none for.
    """
    if kind == "interleaved":
        return _interleaved(pp, stage, micro, chunks)
    if kind not in SCHEDULES or chunks != 1:
        raise ValueError(f"no schedule {kind} with {chunks} chunks")
    if kind == "zero_bubble":
        return _zero_bubble(pp, stage, micro)
    forward, backward = ([Turn(op, 0, k) for k in range(micro)] for op in "FB")
    # Forwards before the first backward can come
    ahead = micro if kind == "gpipe" else min(micro, pp - 1 - stage)
    pairs = [turn for pair in zip(forward[ahead:], backward, strict=False) for turn in pair]
    return forward[:ahead] + pairs + backward[micro - ahead :]


def _interleaved(pp: int, stage: int, micro: int, chunks: int) -> list[Turn]:
    """Micro batches go in groups of pp; a group passes all chunks of a rank before the next group
    comes.
    """
    if micro % pp:
        raise ValueError(f"{micro} micro batches are no groups of {pp}")

    def nth(op: str, i: int) -> Turn:
        group, place = divmod(i, pp * chunks)
        chunk = place // pp if op == "F" else chunks - 1 - place // pp
        return Turn(op, chunk, group * pp + place % pp)

    total = micro * chunks
    ahead = min(total, 2 * (pp - 1 - stage) + (chunks - 1) * pp)
    order = [nth("F", i) for i in range(ahead)]
    for i in range(total - ahead):
        order += [nth("F", ahead + i), nth("B", i)]
    return order + [nth("B", i) for i in range(total - ahead, total)]


def _zero_bubble(pp: int, stage: int, micro: int) -> list[Turn]:
    """As 1f1b, and behind each B the W of `stage` micro batches before."""
    forward, backward, weights = ([Turn(op, 0, k) for k in range(micro)] for op in "FBW")
    ahead = min(micro, pp - 1 - stage)
    order = forward[:ahead]
    for k in range(micro):
        order += [*forward[ahead + k : ahead + k + 1], backward[k]]
        order += [weights[k - stage]] if k >= stage else []
    return order + weights[max(0, micro - stage) :]


def last_half(kind: str) -> str:
    """Return the turn after which a micro batch has added all to the gradients of a chunk, and
    keeps nothing.
    """
    return "W" if kind == "zero_bubble" else "B"


def straight(micro: int) -> list[Turn]:
    """Return the turns without a pipeline: F0 B0 F1 B1 ..."""
    return [Turn(op, 0, k) for k in range(micro) for op in "FB"]


def needed(turn: Turn, stage: int, pp: int, chunks: int) -> tuple[int, Turn] | None:
    """Return the stage and the turn there whose result a turn needs; None if it needs the data
    only.

    The layers of a turn are those of part chunk·pp + stage, of pp·chunks parts.
    """
    part, last = turn.chunk * pp + stage, pp * chunks - 1
    if turn.op == "W":
        return stage, Turn("B", turn.chunk, turn.micro)
    if turn.op == "B" and part == last:
        return stage, Turn("F", turn.chunk, turn.micro)
    if turn.op == "F" and part == 0:
        return None
    chunk, other = divmod(part - 1 if turn.op == "F" else part + 1, pp)
    return other, Turn(turn.op, chunk, turn.micro)


def timetable(
    kind: str, pp: int, micro: int, chunks: int = 1, cost: Mapping[str, int] = ALIKE
) -> list[Row]:
    """Return what each stage begins in each tick, if a turn takes `cost` ticks and messages take no
    time.

    Each stage keeps to its order, and begins a turn as soon as it can. Raises ValueError when some
    never can.
    """
    todo = [turns(kind, pp, stage, micro, chunks) for stage in range(pp)]
    done: dict[tuple[int, Turn], int] = {}  # the tick at whose beginning the result is there
    free, at, table = [0] * pp, [0] * pp, list[Row]()
    while any(at[stage] < len(todo[stage]) for stage in range(pp)) or len(table) < max(free):
        now, row = len(table), list[Turn | None]()
        for stage in range(pp):
            turn = todo[stage][at[stage]] if at[stage] < len(todo[stage]) else None
            if turn is not None:
                need = needed(turn, stage, pp, chunks)
                if free[stage] > now or (need is not None and done.get(need, now + 1) > now):
                    turn = None
            row.append(turn)
        for stage, turn in enumerate(row):
            if turn is not None:
                free[stage] = done[stage, turn] = now + cost[turn.op]
                at[stage] += 1
        if max(free) <= now:
            raise ValueError(f"{kind} of {pp} stages and {micro} micro batches never ends")
        table.append(tuple(row))
    return table


def messages(table: list[Row], pp: int, chunks: int = 1) -> list[list[Message]]:
    """Return what travels between stages at the end of each tick of a table in which turns take
    one.
    """
    wanted: dict[tuple[int, Turn], Message] = {}
    for row in table:
        for stage, turn in enumerate(row):
            need = needed(turn, stage, pp, chunks) if turn else None
            if turn and need and need[0] != stage:
                wanted[need] = Message(need[0], stage, turn)
    return [
        [wanted[s, turn] for s, turn in enumerate(row) if turn and (s, turn) in wanted]
        for row in table
    ]


def bubble(
    kind: str, pp: int, micro: int, chunks: int = 1, cost: Mapping[str, int] | None = None
) -> float:
    """Return the share of the time from the first to the last turn in which a stage waits, mean
    over stages.

    cost: the ticks of each turn; None: those of USUAL, or of HALVES.
    """
    halves = last_half(kind) == "W"
    cost = cost or (HALVES if halves else USUAL)
    work = micro * chunks * sum(cost[op] for op in ("FBW" if halves else "FB"))
    return 1 - work / len(timetable(kind, pp, micro, chunks, cost))


def waited(kind: str, pp: int, micro: int, chunks: int = 1) -> float:
    """Return how long a stage waits in a step, over the time of a forward and backward of one micro
    batch.
    """
    if kind != "zero_bubble" or micro >= pp:
        return (pp - 1) / (3 if kind == "zero_bubble" else chunks)
    share = bubble(kind, pp, micro)
    return micro * share / (1 - share)


def in_flight(kind: str, pp: int, stage: int, micro: int, chunks: int = 1) -> list[int]:
    """Return for each chunk of a stage how many micro batches' activations it keeps when it keeps
    most in all.

    In zero_bubble those are counted whose B is done: what is left of them until W are inputs of
    linear layers.
    """
    now, most = [0] * chunks, [0] * chunks
    for turn in turns(kind, pp, stage, micro, chunks):
        now[turn.chunk] += (turn.op == "F") - (turn.op == last_half(kind))
        most = max(most, now[:], key=sum)
    return most


def drawing(table: list[Row]) -> list[str]:
    """Return a line per stage of a table in which turns take one tick; a turn of chunk 1 is F0', of
    chunk 2 F0''.
    """
    rows = [
        [f"{t.op}{t.micro}" + "'" * t.chunk if t else "·" for t in of]
        for of in zip(*table, strict=True)
    ]
    width = max(len(cell) for row in rows for cell in row)
    return [" ".join(cell.rjust(width) for cell in row) for row in rows]
