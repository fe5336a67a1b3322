"""Find the files of the train and val splits in a folder, or by a pattern.

train.bin               the only file of its split
train_000.bin           one of several, in the order of their numbers
fineweb_train_000001.bin, edufineweb_val_000000.npy, train-00000-of-00008.bin
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, NoReturn

from nanoray.errors import DataError

_NAME = re.compile(
    r"(?P<prefix>(?:.*[_.-])?)"
    r"(?P<split>train|val|valid|validation)"
    r"(?:[_.-]?(?P<number>\d+)(?:-of-(?P<total>\d+))?)?"
    r"\.(?:bin|npy)"
)
_EXAMPLES = "train.bin, train_000.bin, fineweb_train_000001.bin, or .npy"


class Splits(NamedTuple):
    """The names of the files of each split, in their order."""

    train: list[str]
    val: list[str]


class _Name(NamedTuple):
    """The parts of a file's name."""

    file: str
    prefix: str
    split: str
    number: int | None
    total: int | None


def find_splits(folder: Path) -> Splits:
    """Return the token files in `folder`. Raises DataError where it is not clear which these are.

    Files of other names are left alone.
    """
    try:
        files = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(
            f"cannot read the folder {folder}: {error.strerror}; check its permissions"
        ) from None
    by_prefix: dict[str, list[_Name]] = defaultdict(list)
    for file in files:
        name = _parse(file)
        if name:
            by_prefix[name.prefix].append(name)

    # Files with a prefix that are no data set of their own (old_train.bin) are left alone.
    complete = []
    for prefix, names in sorted(by_prefix.items()):
        if {name.split for name in names} == {"train", "val"}:
            complete.append(prefix)
    if len(complete) > 1:
        shown = " and ".join(f"{prefix}train*" for prefix in complete[:3])
        raise DataError(
            f"the folder {folder} has more than one data set ({shown}); move one of them into a "
            f"folder of its own, or choose by a pattern such as --dataset '{folder}/{complete[-1]}*'"
        )
    if not complete:
        _refuse_incomplete(folder, [name for names in by_prefix.values() for name in names])
    names = by_prefix[complete[0]]
    for split in ("train", "val"):
        _require_complete(folder, [name for name in names if name.split == split])
    return _in_order(names)


def match_splits(pattern: str) -> tuple[Path, Splits]:
    """Return the folder and the token files that a pattern names. Raises DataError.

    The user has chosen them, so some numbers may be missing, and prefixes may differ.
    """
    folder = Path(pattern).parent
    if glob.has_magic(str(folder)):
        raise DataError(
            f"dataset = {pattern} has a pattern in the name of a folder; a data set is in one "
            "folder, so write * and ? into the names of files only"
        )
    names = []
    for path in sorted(glob.glob(pattern)):
        file = os.path.basename(path)
        name = _parse(file)
        if name is None:
            raise DataError(
                f"dataset = {pattern} matches {file}, whose name does not say whether it is for "
                f"training or validation; narrow the pattern to names such as {_EXAMPLES}"
            )
        names.append(name)
    if not names:
        raise DataError(f"dataset = {pattern} matches no file; correct the pattern")

    for split in ("train", "val"):
        if all(name.split != split for name in names):
            raise DataError(
                f"dataset = {pattern} matches {len(names)} files, and none of them is for {split}; "
                f"write a pattern that matches both splits, for example '{_of_both(pattern)}'"
            )
    return folder, _in_order(names)


def _parse(file: str) -> _Name | None:
    match = _NAME.fullmatch(file)
    if match is None:
        return None
    split = "train" if match["split"] == "train" else "val"
    number = int(match["number"]) if match["number"] else None
    total = int(match["total"]) if match["total"] else None
    return _Name(file, match["prefix"], split, number, total)


def _refuse_incomplete(folder: Path, names: list[_Name]) -> NoReturn:
    """Raise DataError for a folder in which no data set has both splits."""
    first = {name.split: name.file for name in reversed(names)}
    missing = [f"{split}.bin" for split in ("train", "val") if split not in first]
    if missing:
        raise DataError(
            f"the folder {folder} has no {' and no '.join(missing)}; name a folder that has both, "
            f"under names such as {_EXAMPLES}"
        )
    raise DataError(
        f"the folder {folder} has files of different data sets: {first['train']} and "
        f"{first['val']}; give them one prefix, or choose both by a pattern"
    )


def _require_complete(folder: Path, names: list[_Name]) -> None:
    """Raise DataError where files of a split exclude each other, or a number is missing."""
    numbers = sorted(name.number for name in names if name.number is not None)
    if len(numbers) < len(names):
        if len(names) == 1:
            return
        raise DataError(
            f"the folder {folder} has {names[0].file} and {names[1].file}; keep one of them, or "
            "choose by a pattern"
        )

    remedy = f"copy it again, or choose files by a pattern: --dataset '{folder}/*.bin'"
    for before, after in itertools.pairwise(numbers):
        if before == after:
            same = [name.file for name in names if name.number == after]
            raise DataError(
                f"the folder {folder} has {same[0]} and {same[1]} of one number; keep one of them"
            )
        if after != before + 1:
            raise DataError(
                f"the folder {folder} has {names[0].split} files up to number {before} and from "
                f"{after}, but none between them; {remedy}"
            )
    total = names[0].total
    if total is not None and total != len(names):
        raise DataError(
            f"the folder {folder} has {len(names)} {names[0].split} files of {total} by their "
            f"names; {remedy}"
        )


def _in_order(names: list[_Name]) -> Splits:
    """Sort files by prefix and number, so that 2 comes before 10."""

    def order(name: _Name) -> tuple[str, int, str]:
        number = -1 if name.number is None else name.number
        return name.prefix, number, name.file

    ordered = sorted(names, key=order)
    return Splits(
        [name.file for name in ordered if name.split == "train"],
        [name.file for name in ordered if name.split == "val"],
    )


def _of_both(pattern: str) -> str:
    """Return a pattern with * in the place of the split's name."""
    folder, name = os.path.split(pattern)
    return os.path.join(folder, re.sub(r"train|validation|valid|val", "*", name, count=1))
