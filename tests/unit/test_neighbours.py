"""Names that other programs have for our keys lead to ours, wherever they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.cli.parsers import COMMAND_FLAGS, flag_names
from nanoray.config import did_you_mean, load_config
from nanoray.config.load import read_names
from nanoray.errors import ConfigError
from nanoray.own.settings import loaded_of

KEYS = {*flag_names(), *COMMAND_FLAGS}


def test_the_table_leads_to_flags_that_exist() -> None:
    for theirs, ours in read_names("others.yaml").items():
        assert ours.split()[0] in KEYS, theirs
        assert theirs == theirs.lower(), theirs
        assert theirs not in KEYS - {"world_size"}, f"{theirs} needs no answer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate", "3e-4"], "unknown flag --learning_rate; did you mean --lr?"),
        (["--learning-rate=3e-4"], "unknown flag --learning-rate; did you mean --lr?"),
        (["--learnig_rate", "1"], "unknown flag --learnig_rate; did you mean --lr?"),
        (["--training.seq_len", "8"], "unknown flag --training.seq_len; did you mean --block_size"),
        (["--batch_size=8"], "--micro_batch_size (of a rank in one forward pass; of a whole"),
        (["--n_layr", "1"], "unknown flag --n_layr; did you mean --n_layer?"),
        (["--bogusbogus", "1"], "unknown flag --bogusbogus; `python -m nanoray.train --help all`"),
        (["tiny"], "tiny is the value of no flag"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_closest(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_args(words, "nanoray train", "")
    assert message in str(error.value)


@pytest.mark.parametrize("word", ["init", "dtypes", "tpp", "lrs", "x", "mini", "ranks"])
def test_no_guess_at_a_word_that_is_far_from_all(word: str) -> None:
    """`--init_from` was answered with `--min_lr`: dashes counted as letters in common."""
    with pytest.raises(ConfigError) as error:
        parse_args([f"--{word}", "1"], "nanoray train", "")
    guess = str(error.value).partition("did you mean ")[2].rstrip("?")
    assert guess in ("", "--precision", "--tp", "--lr")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1", "unknown key learning_rate; did you mean lr?"),
        ("optim: {lr: 3}", "unknown key optim.lr; did you mean lr?"),
        ("model: {n_layer: 2}", "unknown key model.n_layer; did you mean n_layer?"),
        ("foo: {bar: 1}", "unknown key foo.bar; `python -m nanoray.train --help all` prints those"),
        ("training: {learning_rate: 1}\nlr: 2", "lr = 2 and lr = 1 are the same key; drop one"),
    ],
)
def test_an_unknown_key_of_a_file_is_answered(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(file), "tiny")
    assert message in str(error.value)


def test_hyphens_are_underscores() -> None:
    config = parse_args(["--max-steps=7", "--eval-every", "3"], "x", "y").config
    assert (config.max_steps, config.eval_every) == (7, 3)
    # A value keeps its own
    assert parse_args(["--name", "my-run", "--out-dir=a-b"], "x", "y").config.out_dir == "a-b"


def test_a_scripts_dict_may_have_nested_keys() -> None:
    values: dict[str, Any] = {
        "training": {"batch_size": 16, "learning_rate": 0.1},
    }
    config = loaded_of(values).config
    assert (config.micro_batch_size, config.grad_accum_steps, config.lr) == (16, 1, 0.1)


def test_dashes_are_no_letters_in_common() -> None:
    """Of a tool's flags, too, which have no table."""
    assert did_you_mean("--dtype", ["--tp", "--lr"]) == "known: --tp, --lr"
    assert did_you_mean("--round", ["--rounds", "--lr"]) == "did you mean --rounds?"
