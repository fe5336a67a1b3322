"""Compare the tokens of a data set with those that the weights of init_from were trained on."""

from __future__ import annotations

from typing import Any

from nanoray.config import Config
from nanoray.config.weights import WeightsFile, find
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError


def describe_init(config: Config, dataset: DatasetInfo) -> list[str]:
    """Return a line on the weights of init_from, and what the run takes of them.

    Raises ConfigError when the ids of the data set mean other tokens than those of the weights.
    """
    if not config.init_from:
        return []
    weights = find(config.init_from)
    refuse_other_tokens(weights, dataset)

    keys = weights.keys
    parts = [f"{keys['n_layer']} layers, {keys['n_head']} heads, width {keys['n_embd']}"]
    if config.block_size < keys["block_size"] and keys["positions"] == "learned":
        parts.append(f"the first {config.block_size} of {keys['block_size']} positions")
    return [f"init   the weights of {weights.path}: {', '.join(parts)}"]


def refuse_other_tokens(weights: WeightsFile, dataset: DatasetInfo) -> None:
    """Raise ConfigError unless the ids of the data set are those that the weights were trained on."""
    ours = dataset.tokenizer
    theirs = weights.tokenizer
    # Bare ids do not say what they mean: only their number can be compared
    comparable = theirs and "ids" not in (ours.get("kind"), theirs.get("kind"))
    same_text = not comparable or ours == theirs
    vocab_size = weights.shape["vocab_size"]
    if same_text and vocab_size == dataset.vocab_size:
        return
    of_theirs = f"{_name(theirs)}, " if theirs else ""
    raise ConfigError(
        f"init_from = {weights.path} was trained on tokens of {of_theirs}vocabulary {vocab_size}, and "
        f"{dataset.name} has tokens of {_name(ours)}, vocabulary {dataset.vocab_size}: the ids mean "
        "other texts; use the data and the tokenizer that belong to the weights"
    )


def _name(tokenizer: dict[str, Any]) -> str:
    return str(tokenizer.get("kind", "an unknown tokenizer"))
