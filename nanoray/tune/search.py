"""Which setting is the fastest: one change at a time from the present one, measured side by side.

    present ─► race of every single change ─► those that gained, together ─► race ─► the new present
                                                                                          │
           final: the best beside the first setting, in turns of its own ◄── nothing gains ◄┘

A race runs its choices in turns, each a short block of real steps, the present setting among them.
After a turn the slower half leaves, and what is far behind, and blocks get longer. A choice is
compared with the present one of the same turn, because the machine's speed drifts. Formulas put the
choices in order, and leave out what they predict to be too large, or far too slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoray.errors import ConfigError
from nanoray.forecast.layouts import GB
from nanoray.tune.expect import Expected
from nanoray.tune.space import Choice, Option, TunedRun, configured, options, with_settings, words
from nanoray.tune.trials import STOPPED, SearchEnded, T, Trials

FIRST_S = 0.3  # of steps in the first block of a choice
LONGEST_S = 1.0  # of steps in a block
STAYING = 3  # choices of a race that are not halved any more
RACE_TURNS = 5  # of those that stay, all in all
LEAST_RACE_TURNS = 3  # where those of the fastest one are CLOSE together
CLOSE = 0.1  # between the quartiles of a ratio
FINAL = 8  # turns of the best and the first setting: fewer where it is clear, else twice as many
FINAL_S = 0.5  # of steps in a block of these turns
PASSES = 3  # of single changes
GAIN = 1.02  # from this ratio on a change is worth a place in the settings
TOO_SLOW = 1.5  # times the present setting by formula: not tried
FAR = 1.1  # times the fastest change of a race: leaves it
HOPELESS = 1.5  # times the present setting in one turn: not tried again with other changes
LEAST_TURNS = 5  # of a verdict
ERRORS = 2.5  # standard errors by which a verdict must be above 1
MARGIN = 0.1  # of a device's memory that formulas leave free


class Ratio(NamedTuple):
    """How many times as fast as another choice, in the turns that measured both."""

    median: float
    low: float  # the lower quartile
    high: float
    turns: int
    slower: int  # turns in which it was not faster

    @property
    def gains(self) -> bool:
        """Whether it seems to be faster: worth a place in what is measured next."""
        return self.turns >= LEAST_RACE_TURNS and self.median >= GAIN and self.low > 1

    @property
    def is_clear(self) -> bool:
        """Whether it is so much faster that more turns would not tell more."""
        return self.is_certain and self.low > FAR

    @property
    def is_certain(self) -> bool:
        """Whether it is faster, and not by the spread alone.

        The standard error of a median is 1.25 standard deviations, each 1/1.35 of the quartiles'
        distance, through the root of the turns. Nearly all turns must have been faster, too, so
        with equal choices this is true less than once in a hundred times.
        """
        if self.turns < LEAST_TURNS or self.slower > self.turns // 10:
            return False
        error = 1.25 / 1.35 * (self.high - self.low) / self.turns**0.5
        return self.median >= GAIN and self.median - ERRORS * error > 1


NO_RATIO = Ratio(0.0, 0.0, 0.0, 0, 0)  # nothing was measured


@dataclass
class Search:
    """A search from the present setting. All ranks run the same one."""

    trials: Trials
    here: TunedRun
    may: Sequence[str]
    memory_bytes: int  # that a rank may take
    expected: Expected | None = None
    leave: Sequence[str] = ()  # knobs that stay as they are
    predicted_s: dict[Choice, float] = field(default_factory=dict)
    best: Choice = ()
    ended: str = ""  # why it ended before its end
    # The best choice found to the first setting, in turns of their own
    verdict: Ratio = NO_RATIO

    def run(self) -> Choice:
        """Search, and return the best choice: () where nothing is faster than the present setting.

        The first block raises what the present setting raises.
        """
        self.trials.next_turn()
        first = self.trials.measure((), FIRST_S)
        if first is None:
            raise ConfigError(f"the present setting cannot be trained: {self.trials.refused[()]}")
        if self.expected:
            self.expected = self.expected.calibrated(configured(self.here, ()), first.step_s)
            self.predicted_s[()] = first.step_s
        # What a race has found first is confirmed in turns of its own: the luckiest of many blocks is
        # not the fastest choice.
        since = 0
        try:
            self._climb()
        except SearchEnded as error:
            self.ended = str(error)
            self.best = self._leading()
        try:
            since = self.trials.turn
            self._confirm()
        except SearchEnded as error:
            self.ended = str(error)
        self.verdict = self.ratio(self.best, (), since)
        if not self.verdict.is_certain:
            self.best = ()
        return self.best

    def _leading(self) -> Choice:
        """Return the choice that is ahead now, among those that were measured more than once.

        A budget that ends in the first turn leaves one block of each. The luckiest of them is not
        the fastest for certain, but is worth the turns that confirm it.
        """
        found = [choice for choice in self.trials.samples if choice not in self.trials.refused]
        others = [choice for choice in found if choice]
        several = [choice for choice in others if self.ratio(choice, ()).turns > 1]
        return max([(), *(several or others)], key=lambda choice: self.ratio(choice, ()).median)

    def _climb(self) -> None:
        for number in range(PASSES):
            singles = self._singles()
            self.trials.say(f"pass {number + 1}  {len(singles)} changes of {words(self.best)}")
            if not singles:
                return
            order = self.race([option.choice for option in singles])
            better = self._together(singles, order)
            if not better:
                return
            ranked = self.race(better)
            if not ranked or not self.ratio(ranked[0], self.best).gains:
                return
            self.best = ranked[0]
            self.trials.say(f"better  {words(self.best)}: {self.ratio(self.best, ()).median:.2f} x")

    def _singles(self) -> list[Option]:
        """Return the best choice with one knob set otherwise, the most promising ones first."""
        found: dict[Choice, Option] = {}
        for option in options(self.here, self.may, self.leave):
            choice = with_settings(self.here, self.best, option.choice)
            if choice == self.best or choice in self.trials.refused:
                continue
            if self._is_hopeless(option) or self._has_lost(choice):
                continue
            reason = self._not_worth(choice)
            if reason:
                self.trials.refuse(choice, reason)
                continue
            found.setdefault(choice, option._replace(choice=choice))
        return sorted(found.values(), key=self._order)

    def _order(self, option: Option) -> tuple[bool, float]:
        """Return what sorts changes: cheap tries first, then those that formulas promise most of."""
        return "compile" in dict(option.choice), self.predicted_s.get(option.choice, 0.0)

    def _is_hopeless(self, option: Option) -> bool:
        """Return whether this change alone was far slower than the first setting."""
        if not self.best:
            return False
        ratio = self.ratio(option.choice, ())
        return ratio.turns > 0 and ratio.median < 1 / HOPELESS

    def _has_lost(self, choice: Choice) -> bool:
        """Return whether this choice was in a race with the best one, and was not faster."""
        ratio = self.ratio(choice, self.best)
        return ratio.turns > 0 and ratio.median < GAIN

    def _not_worth(self, choice: Choice) -> str:
        """Return why a choice is not tried, by formula or by a rule; "" where it is."""
        try:
            config = configured(self.here, choice)
        except ConfigError as error:
            return str(error)
        if self.expected is None:
            return ""
        needs = self.expected.memory_bytes(config)
        if needs > (1 - MARGIN) * self.memory_bytes:
            return (
                f"not tried: needs {needs / GB:.3g} GB by formula, and a rank has "
                f"{self.memory_bytes / GB:.3g} GB, of which {100 * MARGIN:.0f} % stay free"
            )
        self.predicted_s[choice] = self.expected.step_s(config)
        slower = self.predicted_s[choice] / self.predicted_s[()]
        if slower > TOO_SLOW:
            return f"not tried: {slower:.1f} x the present step by formula"
        return ""

    def race(self, choices: Sequence[Choice]) -> list[Choice]:
        """Run choices beside the best one; return them, the fastest first. (all ranks)"""
        alive = list(dict.fromkeys(choices))
        behind: list[Choice] = []  # those that have left, the last one first
        block_s = FIRST_S
        # Each of them once, and then the faster half again, until a few are left
        while len(alive) > STAYING or any(choice not in self.trials.samples for choice in alive):
            alive, left = self._run_turn(alive, block_s)
            behind = left + behind
            block_s = min(LONGEST_S, 1.5 * block_s)
        # These side by side, until it is clear which is the fastest
        last = self._ranked(alive)
        return self._side_by_side([self.best, *last], lambda: self._decide(last, block_s)) + behind

    def _decide(self, alive: list[Choice], block_s: float) -> list[Choice]:
        """Run turns of the last choices of a race; return them, the fastest first. (all ranks)"""
        behind: list[Choice] = []
        while not self._is_decided(alive):
            alive, left = self._run_turn(alive, block_s)
            behind = left + behind
        return alive + behind

    def _run_turn(
        self, alive: Sequence[Choice], block_s: float
    ) -> tuple[list[Choice], list[Choice]]:
        """Run a block of each choice and of the best one. (all ranks)

        Return the choices that stay in the race, and those that leave it, each the fastest first.
        """
        start = self.trials.next_turn() % (len(alive) + 1)
        running = [self.best, *alive]
        for choice in running[start:] + running[:start]:
            self.trials.measure(choice, block_s)
        right = self._ranked(choice for choice in alive if choice not in self.trials.refused)
        self._show(len(running), right)
        # The faster half, but nothing that is far behind
        ratios = [self.ratio(choice, self.best).median for choice in right]
        near = sum(ratio > ratios[0] / FAR for ratio in ratios)
        stay = min(near, max(STAYING, (len(right) + 1) // 2))
        return right[:stay], right[stay:]

    def _ranked(self, choices: Iterable[Choice]) -> list[Choice]:
        """Return choices, the fastest beside the best one first."""
        return sorted(choices, key=lambda choice: -self.ratio(choice, self.best).median)

    def _is_decided(self, alive: Sequence[Choice]) -> bool:
        """Return whether more turns would change nothing; `alive` has the fastest choice first."""
        if not alive:
            return True
        first = self.ratio(alive[0], self.best)
        if first.turns > 1 and first.median < 1:
            return True  # not even the best of them is faster
        turns = min(self.ratio(choice, self.best).turns for choice in alive)
        is_quiet = first.high - first.low < CLOSE
        return turns >= (LEAST_RACE_TURNS if is_quiet else RACE_TURNS)

    def _side_by_side(self, choices: Sequence[Choice], use: Callable[[], T]) -> T:
        """Return what `use` returns, which measures these choices in turn. (all ranks)"""
        return self.trials.keep_open(choices, (1 - MARGIN) * self.memory_bytes, use)

    def _show(self, count: int, alive: Sequence[Choice]) -> None:
        """Print how a race stands."""
        leader = ""
        if alive:
            leader = f"; ahead: {words(alive[0])}, {self.ratio(alive[0], self.best).median:.2f} x"
        self.trials.say(f"turn {self.trials.turn:>4}  {count} settings{leader}")

    def _together(self, singles: Sequence[Option], order: Sequence[Choice]) -> list[Choice]:
        """Return what to race next: the best change alone, and the best ones of all knobs together."""
        knob_of = {option.choice: option.knob for option in singles}
        gained: dict[str, Choice] = {}
        for choice in order:
            if self.ratio(choice, self.best).median >= GAIN:
                gained.setdefault(knob_of[choice], choice)
        better = list(gained.values())
        combined = self.best
        for choice in better:
            larger = with_settings(self.here, combined, difference(choice, self.best))
            if self._is_possible(larger):
                combined = larger
        if len(better) > 1 and combined not in better:
            better = [combined, *better[:2]]
        return better[:STAYING]

    def _is_possible(self, choice: Choice) -> bool:
        reason = self.trials.refused.get(choice) or self._not_worth(choice)
        return not reason

    def _confirm(self) -> None:
        """Measure the best choice beside the first setting once more."""
        if not self.best or self.ended == STOPPED:
            return
        self.trials.reserve_s = 0.0
        self._side_by_side([self.best, ()], self._run_final)

    def _run_final(self) -> None:
        """Run turns of the best choice and the first setting, until it is clear. (all ranks)"""
        since = self.trials.turn
        for number in range(2 * FINAL):
            verdict = self.ratio(self.best, (), since)
            if verdict.is_clear or (
                number >= FINAL and (verdict.is_certain or verdict.median < GAIN)
            ):
                return
            turn = self.trials.next_turn()
            pair = [self.best, ()] if turn % 2 else [(), self.best]
            for choice in pair:
                self.trials.measure(choice, FINAL_S)

    def ratio(self, choice: Choice, other: Choice, since: int = 0) -> Ratio:
        """Return how many times as fast `choice` is as `other`, in the turns after `since` with both."""
        others = {sample.turn: sample.step_s for sample in self.trials.samples.get(other, ())}
        ratios = [
            others[sample.turn] / sample.step_s
            for sample in self.trials.samples.get(choice, ())
            if sample.turn in others and sample.turn > since
        ]
        if not ratios:
            return NO_RATIO
        slower = sum(ratio <= 1 for ratio in ratios)
        if len(ratios) == 1:
            return Ratio(ratios[0], ratios[0], ratios[0], 1, slower)
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median, low, high, len(ratios), slower)


def difference(choice: Choice, other: Choice) -> Choice:
    """Return the settings of a choice that another one has not."""
    return tuple(item for item in choice if item not in other)
