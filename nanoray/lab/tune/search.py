"""Which setting is the fastest: one knob after another is raced beside the best setting so far.

    present ─► knob 1 ─► knob 2 ─► ... ─► the last knob ─► the best setting
                 ▲                                               │
                 └────────── until no knob gains any more ◄──────┘
    at the end: the best beside the present setting, in turns of their own

A race is successive halving. A turn is a short block of real steps of each value of the knob and of
the best setting; after it the slower half leaves. Only blocks of the same turn are compared, because
the machine's speed drifts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from nanoray.errors import ConfigError
from nanoray.lab.tune.knobs import (
    Choice,
    TunedRun,
    configured,
    memory_bytes,
    options,
    with_settings,
    words,
)
from nanoray.lab.tune.trials import STOPPED, SearchEnded, Trials

BLOCK_S = 0.3  # of steps in the first block of a choice
LONGEST_S = 1.0  # of steps in the last block of a race
RACE_TURNS = 4
STAYING = 2  # of a knob's values: one block says too little to halve further
PASSES = 3  # over all knobs
GAIN = 1.02  # from this ratio on a change is worth a place in the settings
FAR = 1.1  # times as fast as another: that one leaves the race
HOPELESS = 1.5  # times as slow as the best setting of then: not raced in a later pass
FINAL_TURNS = 12  # of the best and the present setting
FINAL_S = 0.5  # of steps in a block of these turns
MARGIN = 0.1  # of a device's memory that stays free
GB = 1e9


@dataclass
class Search:
    """A search from the present setting. All ranks run the same one."""

    trials: Trials
    here: TunedRun
    may: Collection[str]
    memory: float  # bytes that a rank may take
    leave: Collection[str] = ()  # knobs that stay as they are
    best: Choice = ()
    ended: str = ""  # why it ended before its end
    # How many times as fast as the present setting the best one was, in turns of their own
    verdict: Sequence[float] = ()

    def run(self) -> Choice:
        """Search, and return the best choice: () where nothing is faster than the present setting.

        Raises ConfigError where the present setting cannot be trained. (all ranks)
        """
        self.trials.next_turn()
        if self.trials.measure((), BLOCK_S) is None:
            raise ConfigError(f"the present setting cannot be trained: {self.trials.refused[()]}")
        try:
            self._race_knobs()
        except SearchEnded as error:
            self.ended = str(error)

        # The luckiest of many blocks is not the fastest choice, so turns of its own confirm it.
        since = self.trials.turn
        try:
            self._confirm()
        except SearchEnded as error:
            self.ended = str(error)
        self.verdict = self.ratios(self.best, (), since)
        if not is_faster(self.verdict):
            self.best = ()
        return self.best

    def _race_knobs(self) -> None:
        """Race the values of one knob after another, until nothing gains. (all ranks)"""
        of_knob: dict[str, list[Choice]] = {}
        for option, knob in options(self.here, self.may, self.leave).items():
            of_knob.setdefault(knob, []).append(option)
        raced_beside: dict[str, Choice] = {}  # the best setting after the knob's last race
        for _ in range(PASSES):
            for knob, found in of_knob.items():
                if raced_beside.get(knob) != self.best:
                    of_knob[knob] = self._race(knob, found)
                    raced_beside[knob] = self.best

    def _race(self, knob: str, values: Sequence[Choice]) -> list[Choice]:
        """Race the values of a knob beside the best setting, which the winner replaces. (all ranks)

        Returns the values that are worth another race beside other settings.
        """
        value_of = {with_settings(self.here, self.best, value): value for value in values}
        racing = [
            choice for choice in value_of if choice != self.best and self._is_possible(choice)
        ]
        alive = self._run_turn(racing, BLOCK_S)
        hopeless = {
            value_of[choice]
            for choice in racing
            if 0 < self.ratio(choice, self.best) < 1 / HOPELESS
        }

        # The models of those that stay are made once for the rest of the race.
        block_s = BLOCK_S
        with self.trials.kept_open([self.best, *alive], (1 - MARGIN) * self.memory):
            for _ in range(RACE_TURNS - 1):
                if not alive:
                    break
                block_s = min(LONGEST_S, 1.5 * block_s)
                alive = self._run_turn(alive, block_s)
        if alive and self.ratio(alive[0], self.best) >= GAIN:
            self.best = alive[0]
            gain = self.ratio(self.best, ())
            self.trials.say(f"better  {knob}: {words(self.best)}, {gain:.2f} x")
        return [value for value in values if value not in hopeless]

    def _is_possible(self, choice: Choice) -> bool:
        """Return whether a choice can be trained, as far as rules and formulas know; note why not."""
        if choice in self.trials.refused:
            return False
        try:
            needs = memory_bytes(self.here, configured(self.here, choice))
        except ConfigError as error:
            self.trials.refuse(choice, str(error))
            return False
        if needs > (1 - MARGIN) * self.memory:
            has = f"a rank has {self.memory / GB:.3g} GB, of which {MARGIN:.0%} stay free"
            self.trials.refuse(choice, f"needs {needs / GB:.3g} GB by formula, and {has}")
            return False
        return True

    def _run_turn(self, choices: Sequence[Choice], block_s: float) -> list[Choice]:
        """Run a block of each choice and of the best setting. (all ranks)

        Returns the faster half, the fastest first, and nothing that is far behind.
        """
        if not choices:
            return []
        running = [self.best, *choices]
        start = self.trials.next_turn() % len(running)
        for choice in running[start:] + running[:start]:
            self.trials.measure(choice, block_s)

        ratios = {
            choice: self.ratio(choice, self.best)
            for choice in choices
            if choice not in self.trials.refused
        }
        ranked = sorted(ratios, key=lambda choice: -ratios[choice])
        half = ranked[: max(STAYING, (len(ranked) + 1) // 2)]
        fastest = max([1.0, *ratios.values()])
        return [choice for choice in half if ratios[choice] > fastest / FAR]

    def _confirm(self) -> None:
        """Measure the best choice beside the present setting once more, in turns. (all ranks)"""
        if not self.best or self.ended == STOPPED:
            return
        self.trials.reserve_s = 0.0
        with self.trials.kept_open([self.best, ()], (1 - MARGIN) * self.memory):
            for _ in range(FINAL_TURNS):
                turn = self.trials.next_turn()
                for choice in ([(), self.best], [self.best, ()])[turn % 2]:
                    self.trials.measure(choice, FINAL_S)

    def ratio(self, choice: Choice, other: Choice) -> float:
        """Return how many times as fast `choice` is as `other`: the median; 0: not measured."""
        return median(self.ratios(choice, other) or [0.0])

    def ratios(self, choice: Choice, other: Choice, since: int = 0) -> list[float]:
        """Return how many times as fast `choice` was, in each turn after `since` that has both."""
        samples = self.trials.samples
        others = {sample.turn: sample.step_s for sample in samples.get(other, ())}
        return [
            others[sample.turn] / sample.step_s
            for sample in samples.get(choice, ())
            if sample.turn in others and sample.turn > since
        ]


def is_faster(ratios: Sequence[float]) -> bool:
    """Return whether these turns show that a choice is faster, and not by the spread alone.

    At most one turn of twelve may say otherwise: with equal choices that happens three times in a
    thousand. A budget that ends before leaves fewer turns, and all of at least six must agree.
    """
    slower = sum(ratio <= 1 for ratio in ratios)
    return (
        len(ratios) >= FINAL_TURNS // 2
        and slower <= len(ratios) // FINAL_TURNS
        and (median(ratios) >= GAIN)
    )
