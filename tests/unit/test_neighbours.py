"""Names that other programs have for our keys lead to ours, wherever they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.cli.parsers import COMMAND_FLAGS, flag_names
from nanoray.config import Config, did_you_mean, load_config, make_config
from nanoray.config.load import NESTED
from nanoray.config.neighbours import Name, find, table, words_of_values
from nanoray.errors import ConfigError
from nanoray.own.settings import loaded_of

KEYS = {*Config.model_fields, *COMMAND_FLAGS}
# Our own names need no answer
FOREIGN = [row for row in table() if row.theirs not in KEYS]


def refusal_of_flag(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args(list(words), "nanoray train", "")
    return str(error.value)


def refusal_of_key(tmp_path: Path, text: str) -> str:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(file), "tiny")
    return str(error.value)


def test_the_table_leads_to_keys_that_exist() -> None:
    for row in table():
        assert set(row.ours) <= KEYS, row
        assert row.ours or row.how, f"{row.theirs} leads nowhere"
        assert row.theirs == row.theirs.lower().replace("-", "_"), row
        for value in (row.values or {}).values():
            assert accepts(row.ours[0], value), (row, value)
    for key, values in words_of_values().items():
        assert all(accepts(key, value) for value in values.values()), key
    rows = [(row.theirs, row.program) for row in table()]
    assert len(set(rows)) == len(rows), "a program has a name once"
    # These programs have flags for what a first run sets
    for program, names in {
        "nanoGPT": "learning_rate batch_size max_iters gradient_accumulation_steps dtype",
        "nanochat": "depth device_batch_size total_batch_size num_iterations max_seq_len",
        "Hugging Face": "per_device_train_batch_size num_train_epochs learning_rate output_dir",
        "torchtitan": "training.steps training.seq_len parallelism.tensor_parallel_degree",
    }.items():
        assert {*names.split()} <= {row.theirs for row in table() if row.program == program}


def accepts(key: str, value: str) -> bool:
    try:
        make_config({"micro_batch_size": 4, "n_layer": 4, key: value})
    except ConfigError as error:
        return "Input should be" not in str(error)  # other keys may be missing
    return True


def refusal_in(place: str, name: str, tmp_path: Path) -> str:
    """Write another program's name into this place, and return what is said of it."""
    outer, _, inner = name.partition(".")
    match place:
        case "flag":
            return refusal_of_flag(f"--{name}", "1")
        case "flag with hyphens":
            return refusal_of_flag(f"--{name.replace('_', '-')}=1")
        case "file":
            return refusal_of_key(
                tmp_path, f"{outer}: {{{inner}: 1}}\n" if inner else f"{name}: 1\n"
            )
        case _:
            with pytest.raises(ConfigError) as error:
                loaded_of({name: 1})
            return str(error.value)


def names_in_places() -> Iterator[tuple[Name, str]]:
    """Each name in one place, and each place for every fourth name: one table answers them all."""
    for i, row in enumerate(FOREIGN):
        places = ["flag", "flag with hyphens"]
        if row.theirs not in NESTED:  # keys of ours, which hold such names
            places += ["file"] if "." in row.theirs else ["file", "script"]
        yield row, places[i % len(places)]


@pytest.mark.parametrize(
    ("row", "place"),
    list(names_in_places()),
    ids=lambda it: it if isinstance(it, str) else it.theirs,
)
def test_another_programs_name_is_answered_with_ours(tmp_path: Path, row: Name, place: str) -> None:
    text = refusal_in(place, row.theirs, tmp_path)
    assert text.startswith("unknown "), text
    assert all(key in text for key in row.ours), text
    assert row.ours or row.how in text, text
    assert "did you mean" not in text, f"a guess at a name that is known: {text}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate", "3e-4"], "unknown flag --learning_rate; write --lr 3e-4"),
        (["--learning-rate=3e-4"], "unknown flag --learning-rate; write --lr 3e-4"),
        (["--dtype=bfloat16"], "unknown flag --dtype; write --precision bf16"),
        (["--dtype", "float8"], "unknown flag --dtype; it is --precision here"),
        (["--bf16"], "unknown flag --bf16; write --precision bf16"),
        (["--training.seq_len", "8"], "unknown flag --training.seq_len; write --block_size 8"),
        (["--optim=adamw_torch_fused"], "unknown flag --optim; write --optimizer adamw"),
        (["--context_parallel_degree", "2"], "--context_parallel_degree; write --cp 2"),
        (["--parallelism.data_parallel_replicate_degree=2"], "it is --replicas here (with dp_mode"),
        (["--deterministic"], "it is --attention here (on a CPU the same seed and ranks give the"),
        (["--max_iters"], "unknown flag --max_iters; it is --max_steps here"),
        (["--decay_lr=False"], "it is --schedule here (false is constant)"),
        (["--adam_epsilon", "1e-6"], "unknown flag --adam_epsilon; it is 1e-8, as in torch"),
        (
            ["--gradient_accumulation_steps", "40"],
            "from nanoGPT: it is --global_batch_size here (there it counts all ranks, so "
            "global_batch_size is batch_size x gradient_accumulation_steps); from Hugging Face: "
            "write --grad_accum_steps 40",
        ),
        (["--learnig_rate", "1"], "--learnig_rate; did you mean learning_rate? write --lr 1"),
        (["--n_layr", "1"], "unknown flag --n_layr; did you mean --n_layer?"),
        (["--precision", "bfloat16"], "or 'fp8'; write bf16"),
        (["--device", "gpu"], "or 'cpu'; write cuda"),
        (["--optimizer", "AdamW"], "or 'muon'; write adamw"),
        (["tiny"], "tiny is the value of no flag; write --preset tiny"),
        (["my.yaml"], "my.yaml is the value of no flag; write --config my.yaml"),
        (["nonsense"], "nonsense is the value of no flag; flags begin with --"),
    ],
)
def test_a_flag_is_answered(words: list[str], message: str) -> None:
    assert message in refusal_of_flag(*words)


@pytest.mark.parametrize("word", ["init", "dtypes", "tpp", "lrs", "x", "mini", "step", "ranks"])
def test_no_guess_at_a_word_that_is_far_from_all(word: str) -> None:
    """`--init_from` was answered with `--min_lr`: dashes counted as letters in common."""
    text = refusal_of_flag(f"--{word}", "1")
    guess = text.partition("did you mean ")[2].partition("?")[0].lstrip("-")
    assert guess in ("", "dtype", "tp", "lr", "steps"), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optimizer: {name: AdamW, lr: 1}",
            "optimizer.name; write optimizer: adamw, as a flat key",
        ),
        ("optim: {lr: 3}", "unknown key optim.lr; write it as a flat key: lr: 3"),
        ("optimizer: {foo: 1}", "optimizer.foo; optimizer has one value, without keys below it"),
        ("model: {n_layer: 2}", "write others as flat keys, e.g. n_layer: 2"),
        (
            "foo: {bar: 1}",
            "unknown key foo; known: the flags that `python -m nanoray.train --help all`",
        ),
        ("kube: {imagee: x}", "kube.imagee = 'x': unknown key; did you mean image?"),
        ("precision: bf16-mixed", "or 'fp8'; write bf16"),
    ],
)
def test_a_key_of_a_file_is_answered(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal_of_key(tmp_path, text)


def test_hyphens_are_underscores() -> None:
    config = parse_args(["--max-steps=7", "--eval-every", "3"], "x", "y").config
    assert (config.max_steps, config.eval_every) == (7, 3)
    # A value keeps its own
    assert parse_args(["--name", "my-run", "--out-dir=a-b"], "x", "y").config.out_dir == "a-b"


def test_a_scripts_dict_may_have_nested_keys() -> None:
    values: dict[str, Any] = {"training": {"batch_size": 16, "learning_rate": 0.1}}
    config = loaded_of(values).config
    assert (config.micro_batch_size, config.lr) == (16, 0.1)


def test_a_config_made_in_python_is_answered() -> None:
    with pytest.raises(ValueError, match=r"unknown key learning_rate; write lr: 0\.1"):
        Config(micro_batch_size=4, learning_rate=0.1)  # type: ignore[call-arg]


def test_dashes_are_no_letters_in_common() -> None:
    """Of a tool's flags, too, which have no table."""
    assert did_you_mean("--dtype", ["--tp", "--lr"]) == "known: --tp, --lr"
    assert did_you_mean("--round", ["--rounds", "--lr"]) == "did you mean --rounds?"


# Words that say nothing about what a name is for
COMMON_WORDS = frozenset(
    {"dir", "end", "every", "local", "lr", "model", "name", "num", "only", "path", "per", "rank"}
    | {"size", "train", "worker"}
)
# Names that deny something, beside a key whose description has a word in common
REVIEWED = {
    "eval_only": "evaluations belong to a run; a trained one has its losses",
    "window_pattern": "the pattern of dataset is one of file names",
    "core_metric_every": "the core of workers is one of a CPU",
    "load_best_model_at_end": "keep_checkpoints keeps the best one in any case",
    "dataloader_num_workers": "ranks are no workers of a loader",
    "training.enable_cpu_offload": "cpus_per_worker offloads nothing",
}
DENIES = re.compile(r"\b(no|not|none|nothing|alone|anyway|in any case|without)\b")


def stems(text: str) -> set[str]:
    """Return the beginnings of words, so that `checkpointing` is `checkpoints`."""
    words = re.findall(r"[a-z]{2,}", text.lower().replace("_", " "))
    singular = {word.removesuffix("s") if len(word) > 3 else word for word in words}
    return {word[:6] for word in singular} - COMMON_WORDS


@pytest.mark.parametrize("key", flag_names())
def test_no_answer_denies_what_a_key_does(key: str) -> None:
    """An answer stays behind when a key is added: "no axis of nanoray cuts the context" did.

    A new one that this finds names the key, or is listed as REVIEWED with the reason.
    """
    does = stems(f"{key} {Config.model_fields[key].description}")
    for row in table():
        denies = not row.ours or DENIES.search(row.how)
        if not denies or key in row.ours or row.theirs in REVIEWED:
            continue
        # The name itself, without its section
        shared = stems(row.theirs.rpartition(".")[2]) & does
        # A row with a key of ours is asked about names alone: its subject is that key
        if row.ours:
            shared &= stems(key)
        assert not shared, f"{row.theirs}: {row.how!r}, but {key} has {shared}"


def test_the_axes_of_another_mesh_lead_to_ours() -> None:
    rows = [row for row in table() if row.program == "torchtitan" and "parallelism." in row.theirs]
    led_to = {key for row in rows for key in row.ours}
    assert {"cp", "cp_attention", "tp", "pp", "ep", "replicas", "pp_schedule"} <= led_to


def test_a_name_without_its_section_is_found() -> None:
    assert [row.ours for row in find("tensor_parallel_degree")] == [("tp",)]
    assert find("no_such_name") == []
    assert "lr" in flag_names()
