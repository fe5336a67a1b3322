"""Read nanoGPT's meta.pkl without running anything: only dictionaries of texts and whole numbers.

A pickle is a program for a stack machine, and some of its instructions call any function that they
name. Here pickletools takes it apart, and only the instructions that build plain values are carried
out; every other one is refused by name. torch's own safe reader reads only what torch.save wrote.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any

from nanoray.errors import DataError

_LARGEST_BYTES = 64 << 20  # far more than any vocabulary of characters
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


def read_vocabulary(path: Path) -> dict[str, Any]:
    """Return the tokenizer of meta.pkl, as tokenizer_from_json reads it. Raises DataError.

    nanoGPT writes {"vocab_size", "itos", "stoi"} for characters. Where there is only a size, or where
    an entry is no single character, the tokens are numbers without a text.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_BYTES:
            raise Refused(f"has {size} bytes, too many for a vocabulary of characters")
        return _tokenizer_of(_build(path.read_bytes()))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except Refused as error:
        raise DataError(
            f"{path} {error}, and unpickling can run any code; write meta.json beside it: "
            '{"tokenizer": {"kind": "char", "chars": "..."}} with the characters in the order of '
            'their ids, or {"vocab_size": V}'
        ) from None


def _build(data: bytes) -> Any:
    """Return the value of a pickle that consists of dictionaries, texts and whole numbers."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            _carry_out(opcode.name, argument, stack, memo)
        (value,) = stack
        return value
    # An unknown instruction, too few values, a key that is a dictionary
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise Refused(f"is no pickle, or a damaged one ({reason})") from None


def _carry_out(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Carry out one instruction. Raises Refused for one that builds no plain dictionary."""
    if name in _IGNORED:
        return
    if name in _PUSHES:
        stack.append(argument)
    elif name == "MARK":
        stack.append(_MARK)

    # Values that are used again are stored in the memo, under a number.
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _PUTS:
        memo[int(argument)] = stack[-1]
    elif name in _GETS:
        stack.append(memo[int(argument)])

    # Dictionaries: empty, from pairs, and with more pairs.
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "DICT":
        stack.append(_pop_pairs(stack))
    elif name == "SETITEM":
        value = stack.pop()
        key = stack.pop()
        stack[-1].update({key: value})
    elif name == "SETITEMS":
        pairs = _pop_pairs(stack)
        stack[-1].update(pairs)
    else:
        raise Refused(f"has the instruction {name}, which is no part of a plain dictionary")


def _pop_pairs(stack: list[Any]) -> dict[Any, Any]:
    """Take the keys and values above the newest mark off the stack, and the mark."""
    values = []
    while stack[-1] is not _MARK:
        values.append(stack.pop())
    stack.pop()
    values.reverse()
    return dict(zip(values[::2], values[1::2], strict=True))


def _tokenizer_of(meta: Any) -> dict[str, Any]:
    """Return the tokenizer of nanoGPT's dictionary. Its two tables must agree."""
    size = meta.get("vocab_size") if isinstance(meta, dict) else None
    if type(size) is not int or not 0 < size <= 1 << 32:
        raise Refused("has no vocab_size, as nanoGPT writes it")
    itos = meta.get("itos")
    stoi = meta.get("stoi")
    if itos is None and stoi is None:
        return {"kind": "ids", "vocab_size": size}

    # itos: number -> text. stoi: text -> number. Their types first, since the values may be anything.
    if not _is_table(itos, int, str) or not _is_table(stoi, str, int):
        raise Refused("has itos or stoi that is no table of numbers and texts")
    if {number: text for text, number in stoi.items()} != itos:
        raise Refused("has itos and stoi that do not agree")
    if itos.keys() != set(range(size)):
        raise Refused(f"has vocab_size = {size}, but its itos has other ids than 0 to {size - 1}")
    texts = [itos[number] for number in range(size)]

    # Text can be cut into characters in one way, into longer entries in many.
    if any(len(text) != 1 for text in texts):
        return {"kind": "ids", "vocab_size": size}
    chars = "".join(texts)
    if texts == sorted(texts):
        return {"kind": "char", "chars": chars}
    return {"kind": "char", "chars": chars, "order": "ids"}


def _is_table(value: Any, of_keys: type, of_values: type) -> bool:
    if not isinstance(value, dict):
        return False
    keys_fit = all(isinstance(key, of_keys) for key in value)
    return keys_fit and all(isinstance(entry, of_values) for entry in value.values())
