"""Find the files of the train and val splits in a folder.

train.bin                  the only file of its split
train_000.bin              one of several, in the order of their numbers
fineweb_train_000001.bin   the same, with a prefix
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from nanoray.errors import DataError

_NAME = re.compile(
    r"(?P<prefix>(?:.*[_.-])?)"
    r"(?P<split>train|val|valid|validation)"
    r"(?:[_.-]?(?P<number>\d+))?"
    r"\.bin"
)
_ALONE = -2  # no number follows it
_EXAMPLES = "train.bin, train_000.bin, fineweb_train_000001.bin"


class Splits(NamedTuple):
    """The names of the files of each split, in their order."""

    train: list[str]
    val: list[str]


class _Name(NamedTuple):
    """The parts of a file's name, in the order by which files are sorted."""

    prefix: str
    number: int  # _ALONE: none
    file: str
    split: str


def find_splits(folder: Path) -> Splits:
    """Return the token files in `folder`. Raises DataError where it is not clear which these are.

    Files of other names are left alone.
    """
    try:
        files = os.listdir(folder)
    except OSError as error:
        raise DataError(
            f"cannot read the folder {folder}: {error.strerror}; check its permissions"
        ) from None
    names = sorted(name for name in map(_parse, files) if name)
    splits = Splits(
        [name.file for name in names if name.split == "train"],
        [name.file for name in names if name.split == "val"],
    )
    missing = [f"{split}.bin" for split in ("train", "val") if not getattr(splits, split)]
    if missing:
        raise DataError(
            f"the folder {folder} has no {' and no '.join(missing)}; name a folder that has both, "
            f"under names such as {_EXAMPLES}, or make them: `nanoray data import` of .npy files, "
            "`nanoray data tokenize` of text"
        )
    prefixes = sorted({name.prefix for name in names})
    if len(prefixes) > 1:
        raise DataError(
            f"the folder {folder} has more than one data set ({prefixes[0]}* and {prefixes[1]}*); "
            "give each of them a folder of its own"
        )

    # A copy may have been cut off.
    for split in ("train", "val"):
        numbers = [name.number for name in names if name.split == split]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise DataError(
                f"the {split} files of {folder} are not numbered one after the other "
                f"({', '.join(getattr(splits, split)[:3])}, ...); copy it again, or name a folder "
                "with links to the files to use"
            )
    return splits


def _parse(file: str) -> _Name | None:
    match = _NAME.fullmatch(file)
    if match is None:
        return None
    split = "train" if match["split"] == "train" else "val"
    number = int(match["number"]) if match["number"] else _ALONE
    return _Name(match["prefix"], number, file, split)
