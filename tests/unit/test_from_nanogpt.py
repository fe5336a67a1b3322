"""A configuration of nanoGPT: read without running it, and what it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import Loaded, parse_args
from nanoray.config import resolve_batch
from nanoray.config.nanogpt import NAMES, read_assignments
from nanoray.config.neighbours import read_names
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError
from nanoray.start.plan import plan
from nanoray.train.__main__ import main
from tests.harness.foreign import POSITIONS, SIZES, nanogpt_checkpoint, transformers_gpt2

# What such files look like: a comment, arithmetic, settings of the tracker
CHAR = """
# a small model of characters
out_dir = 'out-char'
eval_interval = 250  # often
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'chars'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 2 * 2
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 6 * 64
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
"""


def load(tmp_path: Path, text: str, *flags: str) -> Loaded:
    (tmp_path / "config").mkdir(exist_ok=True)
    file = tmp_path / "config" / "train_char.py"
    file.write_text(text)
    return parse_args(["--from_nanogpt", str(file), *flags], "nanoray train", "")


def refusal(tmp_path: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_setting_has_its_counterpart(tmp_path: Path) -> None:
    loaded = load(tmp_path, CHAR)
    config = loaded.config
    wanted: dict[str, Any] = {
        "name": "train_char",
        "out_dir": "out-char",
        "dataset": "shakespeare",
        "tokenizer": "char",
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "block_size": 256,
        "dropout": 0.2,
        "bias": False,
        "micro_batch_size": 64,
        "global_batch_size": 256,
        "max_steps": 5000,
        "stop_at": 0,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "schedule": "cosine",
        "warmup_steps": 100,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "grad_clip": 1.0,
        "eval_every": 250,
        "eval_samples": 200 * 64,
        "checkpoint_every": 250,
        "log_every": 10,
        # Chosen for the device, which the file does not name
        "precision": "auto",
        "compile": False,
        "device": "auto",
    }
    assert {key: getattr(config, key) for key in wanted} == wanted
    # As there, a step has as many sequences on one rank and on four
    assert [resolve_batch(config, ranks) for ranks in (1, 2, 4)] == [
        (64, 4, 1),
        (64, 2, 2),
        (64, 1, 4),
    ]
    text = "\n".join(loaded.notes)
    for said in (
        "nanogpt as there: n_layer 6, n_head 6, n_embd 384,",
        "nanogpt its defaults: bias False, weight_decay 0.1, beta1 0.9, grad_clip 1.0",
        "nanogpt lr = 0.001: learning_rate",
        "nanogpt always_save_checkpoint = False is left out: ",
        "nanogpt wandb_project = chars is left out: ",
    ):
        assert said in text
    # Every setting of the file is named, or its key is
    for name in read_assignments(tmp_path / "config" / "train_char.py").values:
        assert name in text or name in ("wandb_log", "decay_lr"), name


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_bytes(
        "\ufeff# über\nmax_iters = 5\n".replace("\n", "\r\n").encode()
    )
    assert read_assignments(tmp_path / "gpt.py").values == {"max_iters": 5}


def test_what_the_file_does_not_say_is_nanogpts_default(tmp_path: Path) -> None:
    config = load(tmp_path, "n_layer = 3\n", "--dataset", "stdlib").config
    assert (config.n_head, config.n_embd, config.block_size, config.bias) == (12, 768, 1024, False)
    assert (config.lr, config.min_lr, config.beta2, config.warmup_steps) == (6e-4, 6e-5, 0.95, 2000)
    assert (config.micro_batch_size, config.global_batch_size) == (12, 480)
    assert (config.max_steps, config.eval_every, config.log_every) == (600_000, 2000, 1)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("decay_lr = False\nlearning_rate = 3e-5", {"schedule": "constant", "warmup_steps": 0}),
        ("decay_lr = False", {"min_lr": 0.0, "max_steps": 5000}),
        ("lr_decay_iters = 9000", {"max_steps": 9000, "stop_at": 5000}),
        ("dtype = 'bfloat16'", {"precision": "bf16"}),
        ("dtype = 'float16'\ndevice = 'cuda:0'", {"precision": "fp16", "device": "cuda"}),
        ("device = 'cpu'\ndtype = 'bfloat16'", {"precision": "fp32", "device": "cpu"}),
        ("compile = False\nbackend = 'gloo'", {"compile": False, "backend": "gloo"}),
        ("compile = True", {"compile": True}),
        ("init_from = 'resume'", {"resume": "auto"}),
        ("dataset = 'shakespeare'", {"dataset": "shakespeare", "tokenizer": "gpt2"}),
        ("eval_only = False", {"lr": 1e-3, "track": "none"}),
        ("wandb_log = True", {"track": "wandb"}),
        ("import time\nwandb_run_name = 'ft-' + str(time.time())", {"lr": 1e-3}),
        ("'''a text'''\nhours = 2\nmax_iters = hours * 60", {"max_steps": 5000, "stop_at": 120}),
        ("n_layer: int = 2", {"n_layer": 2}),
    ],
)
def test_other_settings(tmp_path: Path, more: str, wanted: dict[str, Any]) -> None:
    config = load(tmp_path, CHAR + more + "\n").config
    assert {key: getattr(config, key) for key in wanted} == wanted


def test_flags_win_and_are_not_said_to_come_from_the_file(tmp_path: Path) -> None:
    flags = ("--lr", "2e-3", "--n_layer", "2", "--max_steps", "10", "--micro_batch_size", "32")
    loaded = load(tmp_path, CHAR + "lr_decay_iters = 4000\n", *flags)
    config = loaded.config
    assert (config.lr, config.n_layer, config.max_steps, config.stop_at) == (2e-3, 2, 10, 0)
    assert resolve_batch(config, 2) == (32, 4, 2)
    text = "\n".join(loaded.notes)
    assert "learning_rate" not in text
    assert "n_layer" not in text


def test_weights_that_a_flag_names_decide_the_sizes(tmp_path: Path) -> None:
    """As in nanoGPT, whose configurations for fine-tuning say nothing of them."""
    weights = nanogpt_checkpoint(tmp_path / "ckpt.pt", transformers_gpt2())
    text = f"init_from = 'gpt2-xl'\nblock_size = {POSITIONS}\nn_layer = 48\n"
    flags = ("--dataset", "stdlib", "--init_from", str(weights))
    config = load(tmp_path, text, *flags).config
    sizes = SIZES | {"block_size": POSITIONS, "bias": True}
    assert {key: getattr(config, key) for key in sizes} == sizes
    assert config.lr == 6e-4


def test_a_folder_that_prepare_has_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "openwebtext"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"\0\0")
    text = "dataset = 'openwebtext'\n"
    config = load(tmp_path, text).config  # beside config/, as in nanoGPT's repository
    assert (config.dataset, config.tokenizer) == (str(folder), "gpt2")
    (folder / "meta.pkl").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, text).config
    assert (config.dataset, config.tokenizer) == ("data/openwebtext", "auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rat = 1",
            "learning_rat is no setting of nanoGPT's train.py; did you mean learn",
        ),
        ("foo = 1", "foo is no setting of nanoGPT's train.py; drop it"),
        ("n_layer = int('3')", "n_layer = int('3') would have to be run, and nothing is"),
        ("n_layer = [1][0]", "line 1: n_layer = [1][0] would have to be run"),
        ("n_layer = undefined", "n_layer = undefined would have to be run"),
        ("n_layer = '3' * 10**9", "would have to be run"),
        ("n_layer = 9 ** 9 ** 9", "n_layer = 9 ** 9 ** 9 has no value (the exponent is too large)"),
        ("n_layer = 1 / 0", "n_layer = 1 / 0 has no value (division by zero)"),
        ("n_layer = 10 ** 50", "has no value (the number is too large)"),
        ("n_layer = '12'", "n_layer = '12' has the type str; write a value such as 12"),
        ("compile = 'yes'", "compile = 'yes' has the type str; write a value such as"),
        ("dataset = 3", "dataset = 3 has the type int; write a value such as 'openwebtext'"),
        ("if True:\n    n_layer = 3", "line 1: only NAME = VALUE is read, and nothing is run"),
        ("a = b = 3", "only NAME = VALUE is read"),
        ("print('x')", "only NAME = VALUE is read"),
        ("__import__('os').system('touch PWNED')", "only NAME = VALUE is read"),
        ("n_layer = __import__('os').getpid()", "would have to be run"),
        ("n_layer = (", "is not Python: "),
        ("n_layer = " + "(" * 5000 + "1" + ")" * 5000, "is not Python: "),
        ("dataset = 'openwebtext'", "give --dataset FOLDER"),
        (CHAR + "init_from = 'gpt2-xl'", "init_from = 'gpt2-xl' would download weights"),
        (CHAR + "eval_only = True", "eval_only = True trains nothing"),
        (CHAR + "device = 'mps'", "device = 'mps' is no device of nanoray; use cuda or cpu"),
        (CHAR + "dtype = 'fp8'", "dtype = 'fp8' is none of float32, bfloat16, float16"),
        (CHAR + "lr_decay_iters = 10", "lr_decay_iters = 10 is below max_iters = 5000"),
        (CHAR + "n_head = 7", "n_embd = 384 is not a multiple of n_head = 7"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_two_recipes_are_refused(tmp_path: Path) -> None:
    assert "are both a whole recipe; drop one" in refusal(tmp_path, CHAR, "--preset", "tiny")
    assert "are both a whole recipe; drop one" in refusal(tmp_path, CHAR, "--config", "x.yaml")
    with pytest.raises(ConfigError, match=r"cannot read /nowhere\.py: No such file"):
        parse_args(["--from_nanogpt", "/nowhere.py"], "x", "")
    with pytest.raises(ConfigError, match=r"x\.py is the value of no flag; write --from_nanogpt x"):
        parse_args(["x.py", "--batch_size=32"], "x", "")


def test_the_defaults_are_read_by_their_own_rules(tmp_path: Path) -> None:
    """Each default written into a file is the value of the file."""
    lines = [
        f"{name} = {value!r}"
        for name, value in read_names(NAMES)["defaults"].items()
        if value is not None
    ]
    both = [load(tmp_path, text, "--dataset", "stdlib").config for text in ("", "\n".join(lines))]
    assert both[0].model_copy(update={"out_dir": "out"}) == both[1]


def test_a_plan_and_a_dry_run_print_what_it_became(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(tmp_path, CHAR)
    dataset = DatasetInfo("x", "x", Path("/x"), "uint16", 65, 10_000, 1000, "", "", {}, "text")
    notes = plan(loaded, 2, dataset).notes
    assert notes[0].startswith("nanogpt as there: ")
    file = str(tmp_path / "config" / "train_char.py")
    flags = ["--from_nanogpt", file, "--dataset", str(text), "--data_dir", str(tmp_path)]
    assert main([*flags, "--n_layer", "1", "--dry_run"]) == 0
    assert "nanogpt lr = 0.001: learning_rate" in capsys.readouterr().out
