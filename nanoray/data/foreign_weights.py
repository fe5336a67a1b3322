"""Compare the tokens of a data set with the vocabulary of the weights that a run begins with."""

from __future__ import annotations

from typing import Any

from nanoray.config import VOCAB_MULTIPLE, Config
from nanoray.config.weights.gpt2 import describe_names
from nanoray.config.weights.source import Source, find
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError


def describe_init(config: Config, dataset: DatasetInfo) -> list[str]:
    """Return a line on the weights of init_from, and what the run takes of them.

    Raises ConfigError when the ids of the data set mean other tokens than those of the weights.
    """
    if not config.init_from:
        return []
    source = find(config.init_from)
    refuse_other_tokens(source, dataset)

    keys = source.keys
    parts = [f"{keys['n_layer']} layers, {keys['n_head']} heads, width {keys['n_embd']}"]
    parts.append("with biases" if keys["bias"] else "without biases")
    parts.append(f"gelu {keys['gelu']}")
    if config.block_size < keys["block_size"] and keys["positions"] == "learned":
        parts.append(f"the first {config.block_size} of {keys['block_size']} positions")
    parts.append(_describe_rows(source.rows, dataset.vocab_size))
    parts += describe_names(source.names)
    if config.pure:
        parts.append(f"rounded to 16 bits (precision = {config.precision})")
    return [f"init   {source.kind} in {source.path}: {', '.join(parts)}"]


def _describe_rows(rows: int, vocab_size: int) -> str:
    """Say what becomes of the rows of the embedding that are no tokens."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    text = f"vocabulary {vocab_size}"
    if rows > vocab_size:
        text += f" (of the {rows} rows there, the last {rows - vocab_size} get no probability)"
    if padded > rows:
        text += f" (padded to {padded} rows, of zeros, that get no probability)"
    return text


def refuse_other_tokens(source: Source, dataset: DatasetInfo) -> None:
    """Raise ConfigError unless the ids of the data set are those that the weights were trained on."""
    ours = dataset.tokenizer
    theirs = source.tokenizer
    # Bare ids do not say what they mean: only their number can be compared.
    comparable = theirs and "ids" not in (ours.get("kind"), theirs.get("kind"))
    if comparable and ours != theirs:
        remedy = f"use --tokenizer {theirs['kind']}"
        if ours.get("kind") == theirs.get("kind"):
            remedy = "use data prepared with the same characters"
        raise ConfigError(
            f"init_from = {source.path} was trained on tokens of {_name(theirs)}, and "
            f"{dataset.name} has tokens of {_name(ours)}: the ids mean other texts; {remedy}"
        )

    rows = source.rows
    if rows == dataset.vocab_size:
        return
    # A vocabulary that was padded before: only of tokenizers whose size is fixed, because of
    # characters it could as well be another alphabet.
    padded = -(-dataset.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if rows == padded and ours.get("kind") in ("gpt2", "ids"):
        return
    remedy = "use the data and the tokenizer that belong to the weights"
    if source.tokenizer_kind:
        remedy = f"use --tokenizer {source.tokenizer_kind}, or data with such tokens"
    raise ConfigError(
        f"init_from = {source.path} has a vocabulary of {rows} tokens, and {dataset.name} has "
        f"{dataset.vocab_size} ({_name(ours)}): the ids mean other texts; {remedy}"
    )


def _name(tokenizer: dict[str, Any]) -> str:
    kind = tokenizer.get("kind", "an unknown tokenizer")
    if kind == "char":
        return f"char with {len(tokenizer.get('chars', ''))} characters"
    return str(kind)
