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

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from nanoray.errors import ConfigError
from nanoray.lab.tune.knobs import (
    KNOBS,
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
RACES = 0.65  # of the budget: the rest is for the turns that confirm what was found
FINAL_TURNS = 12  # of the best and the present setting
FINAL_S = 0.5  # of steps in a block of these turns
GB = 1e9


@dataclass
class Search:
    """A search from the present setting. All ranks run the same one."""

    trials: Trials
    here: TunedRun
    budget_s: float
    may_differ: bool = False  # also settings with other random masks, or statistics of batch norms
    only: Collection[str] = tuple(KNOBS)  # the knobs that may change
    say: Callable[[str], None] = print
    best: Choice = ()
    gain: float = 1.0  # how many times as fast as the present setting the best one is
    ended: str = ""  # why it ended before its end

    def run(self) -> Choice:
        """Search, and return the best choice: () where nothing is faster than the present setting.

        Raises ConfigError where the present setting cannot be trained. (all ranks)
        """
        began = time.monotonic()
        self.trials.deadline = began + RACES * self.budget_s
        self.trials.next_turn()
        try:
            if self.trials.measure((), BLOCK_S) is None:
                raise ConfigError(
                    f"the present setting cannot be trained: {self.trials.refused[()]}"
                )
            self._race_knobs()
        except SearchEnded as error:
            self.ended = str(error)
        # Who stops a search has the best setting so far.
        if self.best and self.ended != STOPPED:
            self.trials.deadline = began + self.budget_s
            self._confirm()
        return self.best

    def _race_knobs(self) -> None:
        """Race the values of one knob after another, until nothing gains. (all ranks)"""
        values_of = options(self.here, self.may_differ, self.only)
        raced_beside: dict[str, Choice] = {}  # the best setting after the knob's last race
        for _ in range(PASSES):
            for knob, values in values_of.items():
                if raced_beside.get(knob) != self.best:
                    self._race(knob, values)
                    raced_beside[knob] = self.best

    def _race(self, knob: str, values: Sequence[Choice]) -> None:
        """Race the values of a knob beside the best setting, which the winner replaces. (all ranks)"""
        racing = [with_settings(self.here, self.best, value) for value in values]
        alive = [choice for choice in racing if choice != self.best and self._is_possible(choice)]
        block_s = BLOCK_S
        for turn in range(RACE_TURNS):
            # The models of those that have got through the first turn stay for the rest of the race.
            alive = self._run_turn(alive, block_s, stay=turn > 0)
            block_s = min(LONGEST_S, 1.5 * block_s)
        if not alive:
            return
        gain = median(self.ratios(alive[0], self.best))
        if gain >= GAIN:
            self.best = alive[0]
            self.gain *= gain
            self.say(f"better  {knob}: {words(self.best)}, {self.gain:.2f} x")

    def _is_possible(self, choice: Choice) -> bool:
        """Return whether a choice can be trained, as far as rules and formulas know; note why not."""
        if choice in self.trials.refused:
            return False
        try:
            needs = memory_bytes(self.here, configured(self.here, choice))
        except ConfigError as error:
            self.trials.refuse(choice, str(error))
            return False
        if needs > self.trials.memory:
            has = f"a rank has {self.trials.memory / GB:.3g} GB"
            self.trials.refuse(choice, f"needs {needs / GB:.3g} GB by formula, and {has}")
            return False
        return True

    def _run_turn(self, choices: Sequence[Choice], block_s: float, stay: bool) -> list[Choice]:
        """Run a block of each choice and of the best setting. (all ranks)

        Returns the faster half, the fastest first, and nothing that is far behind.
        """
        if not choices:
            return []
        running = [self.best, *choices]
        start = self.trials.next_turn(running if stay else ()) % len(running)
        for choice in running[start:] + running[:start]:
            self.trials.measure(choice, block_s)

        ratios = {
            choice: median(self.ratios(choice, self.best) or [0.0])
            for choice in choices
            if choice not in self.trials.refused
        }
        ranked = sorted(ratios, key=lambda choice: -ratios[choice])
        half = ranked[: max(STAYING, (len(ranked) + 1) // 2)]
        fastest = max([1.0, *ratios.values()])
        return [choice for choice in half if ratios[choice] > fastest / FAR]

    def _confirm(self) -> None:
        """Measure the best choice beside the present setting once more, in turns. (all ranks)

        The luckiest of many blocks is not the fastest choice. The present setting stays where these
        turns do not show that the best one is faster.
        """
        since = self.trials.turn
        try:
            for _ in range(FINAL_TURNS):
                turn = self.trials.next_turn([self.best, ()])
                for choice in ([(), self.best], [self.best, ()])[turn % 2]:
                    self.trials.measure(choice, FINAL_S)
        except SearchEnded as error:
            self.ended = str(error)
        ratios = self.ratios(self.best, (), since)
        if is_faster(ratios):
            self.gain = median(ratios)
        elif self.ended != STOPPED:
            self.best = ()
            self.gain = 1.0

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
