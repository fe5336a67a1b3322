"""Carry out the instructions of a pickle that build dictionaries of plain values, and no other.

A pickle is a program for a stack machine, and some of its instructions call any function that they
name. Here pickletools takes it apart, so nothing is imported or called. A reader of more kinds of
values adds their instructions in a subclass.
"""

from __future__ import annotations

import pickletools
from abc import ABC, abstractmethod
from typing import IO, Any

# Instructions that do nothing to the values
_IGNORED = {"PROTO", "FRAME"}
# Instructions that push their argument, a whole number or a text
_PUSHES = {
    *("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_MARK = object()


class Refused(Exception):
    """Why a pickle is not read."""


class Damaged(Refused):
    """The instructions do not fit together: the first line of what went wrong."""


class PickleMachine(ABC):
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes | IO[bytes]) -> Any:
        """Return the value of a pickle; a file's position is behind it then. Raises Refused."""
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    break
                self._carry_out(opcode.name, argument)
            return self.result()
        # An unknown instruction, too few values, a key that is a dictionary
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise Damaged(str(e).partition("\n")[0]) from None

    def result(self) -> Any:
        """Return the value that the instructions have left on the stack."""
        return self.stack.pop()

    @abstractmethod
    def carry_out_other(self, name: str, argument: Any) -> None:
        """Carry out an instruction that this class does not know. Raises Refused for others."""

    def _carry_out(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _PUSHES:
            stack.append(argument)
        elif name == "MARK":
            stack.append(_MARK)

        # Values that are used again are stored in the memo, under a number.
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _PUTS:
            self._memo[int(argument)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[int(argument)])

        # Dictionaries: empty, from pairs, and with more pairs.
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            stack.append(_paired(self.pop_to_mark()))
        elif name == "SETITEM":
            value = stack.pop()
            key = stack.pop()
            stack[-1].update({key: value})
        elif name == "SETITEMS":
            pairs = self.pop_to_mark()
            stack[-1].update(_paired(pairs))
        else:
            self.carry_out_other(name, argument)

    def pop_to_mark(self) -> list[Any]:
        """Take the values above the newest mark off the stack, and the mark."""
        values = []
        while self.stack[-1] is not _MARK:
            values.append(self.stack.pop())
        self.stack.pop()
        return values[::-1]


def _paired(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))
