"""Keys of the data set and its tokens."""

from __future__ import annotations

from typing import Literal

from nanoray.config.fields import Group, field, hidden, path

IMAGES = ("cifar10", "cifar10-generated")  # data sets of images; all others are text


class DataKeys(Group):
    """The data: which set, where it comes from, and how text becomes tokens."""

    # Which data, and where they come from
    dataset: str = path("auto", "data", min_length=1)
    """auto (cached, downloaded, else Python's standard library) | shakespeare | stdlib | PATH of a
    text file, or of a folder with token files; resnet: auto | cifar10 |
    cifar10-generated (patterns of 10 classes under noise)"""

    data_dir: str = path("", "data")
    """cache of downloads and tokens (default: $XDG_CACHE_HOME/nanoray or ~/.cache/nanoray)"""

    # How text becomes tokens
    tokenizer: Literal["auto", "char", "byte", "gpt2"] = field("auto", "data")
    """auto (char for Shakespeare, else byte) | char | byte | gpt2 (needs: pip install tiktoken)"""

    val_fraction: float = hidden(0.1, "data", gt=0, lt=0.5)
    """fixed: share of the text, at its end, kept for validation"""
