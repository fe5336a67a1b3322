"""Which setting is the fastest: one change at a time from the present one, measured side by side.

    present ─► every single change ─► those that gained, together ─► the fastest is the new present
       ▲                                                                         │
       └──────────────────────── until nothing gains ◄──────────────────────────┘
    final: the best beside the first setting, in turns of its own

Choices are compared by successive halving. A turn is a short block of real steps of each of them and
of the present setting; after it the slower half leaves. A choice is compared with the present one of
the same turn, because the machine's speed drifts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from nanoray.errors import ConfigError
from nanoray.tune.knobs import (
    Choice,
    TunedRun,
    configured,
    memory_bytes,
    options,
    with_settings,
    words,
)
from nanoray.tune.trials import STOPPED, SearchEnded, Trials

BLOCK_S = 0.3  # of steps in the first block of a choice
LONGEST_S = 1.0  # of steps in a block of those that stay
STAYING = 3  # choices that are not halved any more
RACE_TURNS = 4  # of those that stay, all in all
PASSES = 3  # of single changes
GAIN = 1.02  # from this ratio on a change is worth a place in the settings
FAR = 1.1  # times as fast as another: that one leaves at once
HOPELESS = 1.5  # times as slow as the first setting: not tried again with other changes
FINAL_TURNS = 12  # of the best and the first setting
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
    # How many times as fast as the first setting the best one was, in turns of their own
    verdict: Sequence[float] = ()

    def run(self) -> Choice:
        """Search, and return the best choice: () where nothing is faster than the present setting.

        Raises ConfigError where the present setting cannot be trained. (all ranks)
        """
        self.trials.next_turn()
        if self.trials.measure((), BLOCK_S) is None:
            raise ConfigError(f"the present setting cannot be trained: {self.trials.refused[()]}")
        try:
            self._climb()
        except SearchEnded as error:
            self.ended = str(error)
            self.best = self._leading()

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

    def _climb(self) -> None:
        """Change one thing at a time, and go on from what is faster, until nothing gains."""
        for number in range(PASSES):
            singles = self._singles()
            self.trials.say(f"pass {number + 1}  {len(singles)} changes of {words(self.best)}")
            better = self._together(singles, self._halve(list(singles)))
            if len(better) > 1:
                better = self._halve(better)
            if not better or self.ratio(better[0], self.best) < GAIN:
                return
            self.best = better[0]
            self.trials.say(f"better  {words(self.best)}: {self.ratio(self.best, ()):.2f} x")

    def _singles(self) -> dict[Choice, str]:
        """Return the best choice with one knob set otherwise, and the name of that knob."""
        found = {}
        for option, knob in options(self.here, self.may, self.leave).items():
            choice = with_settings(self.here, self.best, option)
            # Not what was far slower alone, or was measured beside the best one already
            is_hopeless = self.best and 0 < self.ratio(option, ()) < 1 / HOPELESS
            is_known = choice == self.best or self.ratio(choice, self.best)
            if not is_hopeless and not is_known and self._is_possible(choice):
                found[choice] = knob
        return found

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

    def _halve(self, choices: Sequence[Choice]) -> list[Choice]:
        """Run turns of choices beside the best one: of all, of the faster half, and so on.

        Returns those that can be trained, the fastest first. (all ranks)
        """
        alive = list(choices)
        behind: list[Choice] = []  # those that have left, the last one first
        block_s = BLOCK_S
        turns = 0
        while alive and (turns == 0 or len(alive) > STAYING):
            alive, left = self._run_turn(alive, block_s)
            behind = left + behind
            block_s = min(LONGEST_S, 1.5 * block_s)
            turns += 1

        if not alive or turns >= RACE_TURNS:
            return alive + behind
        # The last few side by side, unless not even the first of them is faster
        with self.trials.kept_open([self.best, *alive], (1 - MARGIN) * self.memory):
            while alive and turns < RACE_TURNS:
                if turns > 1 and self.ratio(alive[0], self.best) < 1:
                    break
                alive, left = self._run_turn(alive, block_s)
                behind = left + behind
                turns += 1
        return alive + behind

    def _run_turn(
        self, alive: Sequence[Choice], block_s: float
    ) -> tuple[list[Choice], list[Choice]]:
        """Run a block of each choice and of the best one. (all ranks)

        Returns the choices that stay, and those that leave, each the fastest first.
        """
        running = [self.best, *alive]
        start = self.trials.next_turn() % len(running)
        for choice in running[start:] + running[:start]:
            self.trials.measure(choice, block_s)

        right = [choice for choice in alive if choice not in self.trials.refused]
        ratios = {choice: self.ratio(choice, self.best) for choice in right}
        ranked = sorted(right, key=lambda choice: -ratios[choice])
        if not ranked:
            return [], []
        most = ratios[ranked[0]]
        self.trials.say(
            f"turn {self.trials.turn:>4}  {len(running)} settings; ahead: {words(ranked[0])}, "
            f"{most:.2f} x"
        )
        # The faster half, but nothing that is far behind
        near = sum(ratio > most / FAR for ratio in ratios.values())
        stay = min(near, max(STAYING, (len(ranked) + 1) // 2))
        return ranked[:stay], ranked[stay:]

    def _together(self, singles: dict[Choice, str], ranked: Sequence[Choice]) -> list[Choice]:
        """Return the best changes of all knobs that gained together, and the best ones alone."""
        gained: dict[str, Choice] = {}  # of each knob
        for choice in ranked:
            if self.ratio(choice, self.best) >= GAIN:
                gained.setdefault(singles[choice], choice)
        combined = self.best
        for choice in gained.values():
            # What this change has set otherwise than the best one
            larger = with_settings(self.here, combined, set(choice) - set(self.best))
            if self._is_possible(larger):
                combined = larger
        better = list(gained.values())
        if len(better) > 1 and combined not in better:
            better = [combined, *better]
        return better[:STAYING]

    def _leading(self) -> Choice:
        """Return the choice that is ahead when the budget ends, if possible one of several blocks."""
        samples = self.trials.samples
        right = [choice for choice in samples if choice and choice not in self.trials.refused]
        several = [choice for choice in right if len(samples[choice]) > 1]
        return max([(), *(several or right)], key=lambda choice: self.ratio(choice, ()))

    def _confirm(self) -> None:
        """Measure the best choice beside the first setting once more, in turns. (all ranks)"""
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
