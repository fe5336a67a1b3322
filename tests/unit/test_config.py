"""The one definition: layers, flags, error texts, batch arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoray.cli import parse_args
from nanoray.config import (
    Batch,
    Config,
    batch_for,
    load_config,
    make_config,
    resolve_batch,
)
from nanoray.errors import ConfigError


def parse(*argv: str) -> Config:
    return parse_args(list(argv), "prog", "what").config


def test_shakespeare_cpu_is_nanogpts_cpu_recipe() -> None:
    c = load_config(preset="shakespeare-cpu")
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.global_batch_size) == (4, 4, 128, 64, 12)
    assert (c.max_steps, c.dropout, c.lr, c.min_lr, c.warmup_steps, c.beta2) == (
        2000,
        0.0,
        3e-3,
        1e-4,
        100,
        0.99,
    )
    assert c.expected_val_loss["shakespeare"] == 1.88


def test_layers_default_preset_file_flag(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 3e-4\nmin_lr: 1e-5\nn_layer: 3\n")  # YAML reads 3e-4 as a string
    c = parse("--preset", "tiny", "--config", str(file), "--n_layer", "5")
    assert (c.name, c.lr, c.n_layer, c.n_embd, c.beta1) == ("mine", 3e-4, 5, 32, 0.9)


def test_a_file_names_the_preset_below_it(tmp_path: Path) -> None:
    file, named = tmp_path / "mine.yaml", tmp_path / "named" / "mine.yaml"
    named.parent.mkdir()
    file.write_text("lr: 3e-4\n")
    named.write_text("preset: tiny\nlr: 3e-4\n")
    assert parse("--config", str(named)) == parse("--preset", "tiny", "--config", str(file))
    assert parse("--config", str(named), "--preset", "shakespeare-cpu").n_embd == 128, (
        "a flag overrides a key"
    )
    named.write_text("preset: tinny\n")
    with pytest.raises(ConfigError, match="did you mean tiny"):
        parse("--config", str(named))


def test_every_key_but_the_hidden_ones_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--help", "all")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    hidden = {"expected_val_loss", "kube", "micro_batch_search"}
    hidden |= {"val_fraction", "resnet_width", "seq_warmup_from"}
    assert {k for k in Config.model_fields if f"--{k} " not in text} == hidden


def test_flags_take_text_and_switches() -> None:
    c = parse("--workers", "3", "--compile", "--bias", "false", "--resume", "auto")
    assert (c.workers, c.compile, c.bias, c.resume) == (3, True, False, "auto")
    assert parse("--compile", "cuda_graphs").compile == "cuda_graphs"
    assert parse("--workers", "auto").workers == "auto"


def test_config_json_reads_back(tmp_path: Path) -> None:
    c = parse("--preset", "shakespeare-char", "--lr", "0.00030000000000000003")
    file = tmp_path / "config.json"
    file.write_text(c.to_json())
    assert load_config(str(file)) == c
    assert json.loads(c.to_json())["lr"] == c.lr


def test_resuming_a_path_takes_that_runs_configuration(tmp_path: Path) -> None:
    """What the run is comes from its config.json; what the earlier command asked for (stop_at,
    fault) does not.
    """
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000012").mkdir(parents=True)
    first = parse(
        "--preset",
        "tiny",
        "--lr",
        "2e-3",
        "--stop_at",
        "12",
        "--target_loss",
        "2",
        "--faults",
        "kill@rank=0,step=1",
    )
    (run / "config.json").write_text(first.to_json())
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_00000012"):
        c = parse("--resume", str(path), "--max_steps", "99")
        assert (c.n_layer, c.lr, c.max_steps, c.stop_at, c.faults, c.resume) == (
            2,
            2e-3,
            99,
            0,
            "",
            str(path),
        )
        assert c.target_loss == 0
    assert parse("--resume", str(run), "--preset", "shakespeare-cpu").n_layer == 4, (
        "a preset that is given wins"
    )


ERRORS = [
    (["--lrr", "1"], "unknown flag --lrr; did you mean --lr?"),
    (["--dataset", "a_train.bin", "a_val.bin"], "a_val.bin is the value of no flag"),
    (["--lr", "abc"], "lr = 'abc': Input should be a valid number"),
    (["--lr", "nan"], "lr = 'nan': Input should be a finite number"),
    (["--n_head", "3"], "n_embd = 128 is not a multiple of n_head = 3; try n_embd 126"),
    (
        ["--stop_at", "3000"],
        "stop_at = 3000 is beyond max_steps = 2000; lower stop_at or raise max_steps",
    ),
    (["--preset", "tinny"], "did you mean tiny?"),
    (
        ["--config", "/nowhere.yaml"],
        "cannot read /nowhere.yaml: No such file or directory; check the path",
    ),
    (["--name", "a/b"], "name = 'a/b': String should match pattern"),
]


@pytest.mark.parametrize(("argv", "text"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_bad_flags_say_what_and_how(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("n_layr: 1", "unknown key n_layr; did you mean n_layer?"),
        ("- 1", "must contain `key: value` lines, not a list"),
    ],
)
def test_bad_files_say_what_and_how(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config(str(file))
    assert text in str(error.value)


def test_batch_given_per_rank_or_in_total() -> None:
    assert resolve_batch(parse(), 2) == (6, 1, 2)
    # Accumulation follows from the total
    assert resolve_batch(parse("--micro_batch_size", "2"), 2) == (2, 3, 2)
    assert resolve_batch(parse("--grad_accum_steps", "3"), 2) == (2, 3, 2)
    # Replaces the preset's total
    per_rank = parse("--micro_batch_size", "5", "--grad_accum_steps", "3")
    assert resolve_batch(per_rank, 7) == (5, 3, 7)
    assert resolve_batch(per_rank, 7).global_size == 105


@pytest.mark.parametrize(
    ("argv", "dp", "text"),
    [
        (
            [],
            5,
            "global_batch_size = 12 is not a multiple of grad_accum_steps*ranks = 1*5 = 5; try "
            "global_batch_size 10",
        ),
        (
            ["--micro_batch_size", "5"],
            2,
            "not a multiple of micro_batch_size*ranks = 5*2 = 10; try global_batch_size 10",
        ),
        (
            ["--micro_batch_size", "2", "--grad_accum_steps", "2", "--global_batch_size", "12"],
            2,
            "micro_batch_size*grad_accum_steps*ranks = 2*2*2 = 8, but global_batch_size = 12; drop "
            "one of the three",
        ),
    ],
)
def test_batch_that_does_not_divide(argv: list[str], dp: int, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_batch(parse(*argv), dp)
    assert text in str(error.value)


@given(st.integers(0, 64), st.integers(0, 16), st.integers(0, 512), st.integers(1, 16))
def test_batch_arithmetic_never_lies(micro: int, accum: int, total: int, dp: int) -> None:
    if not micro and not total:
        return
    config = make_config(
        {"micro_batch_size": micro, "grad_accum_steps": accum, "global_batch_size": total}
    )
    try:
        batch = resolve_batch(config, dp)
    except ConfigError:
        assert total
        return
    assert (
        batch.micro * batch.accum * dp == batch.global_size == (total or micro * (accum or 1) * dp)
    )
    assert not micro or batch.micro == micro
    assert not accum or batch.accum == accum


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([*Config.model_fields, "bogus"]),
        st.one_of(
            st.none(),
            st.integers(),
            st.floats(),
            st.text(max_size=8),
            st.booleans(),
            st.lists(st.integers(), max_size=2),
        ),
    )
)
def test_any_values_make_a_config_or_a_config_error(values: dict[str, object]) -> None:
    try:
        config = make_config(values)
    except ConfigError:
        return
    assert make_config(json.loads(config.to_json())) == config


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_file_is_read_or_refused(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            config = load_config(str(file), "tiny")
        except ConfigError:
            return
        assert yaml.safe_load(text) in (None, {}) or config


def test_fewer_ranks_get_micro_batches_that_an_interleaved_pipeline_can_take() -> None:
    """Three micro batches are no groups of two."""
    of = {
        "n_layer": 4,
        "pp": 2,
        "micro_batch_size": 2,
        "grad_accum_steps": 2,
        "global_batch_size": 12,
    }
    plain, interleaved = (
        make_config(of | {"pp_schedule": kind}) for kind in ("1f1b", "interleaved")
    )
    assert batch_for(plain, 3, 2) == Batch(2, 3, 2)
    assert batch_for(interleaved, 3, 2) == Batch(1, 6, 2)
