"""Names that other programs have for our keys lead to ours, wherever they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.cli import parse_args
from nanoray.cli.parsers import COMMAND_FLAGS, flag_names
from nanoray.config import load_config
from nanoray.config.load import read_names
from nanoray.errors import ConfigError

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
        (["--bogusbogus", "1"], "unknown flag --bogusbogus; `nanoray train --help all`"),
        (["tiny"], "tiny is the value of no flag"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_closest(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_args(words, "nanoray train", "")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1", "unknown key learning_rate; did you mean lr?"),
        ("optim: {lr: 3}", "unknown key optim.lr; did you mean lr?"),
        ("model: {n_layer: 2}", "unknown key model.n_layer; did you mean n_layer?"),
        ("foo: {bar: 1}", "unknown key foo.bar; `nanoray train --help all` prints those"),
        ("training: {learning_rate: 1}\nlr: 2", "lr = 2 and lr = 1 are the same key; drop one"),
    ],
)
def test_an_unknown_key_of_a_file_is_answered(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(file), "tiny")
    assert message in str(error.value)
