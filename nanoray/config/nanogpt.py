"""A configuration of nanoGPT as one of ours: `--from_nanogpt config/train_gpt2.py`.

Such a file replaces defaults of nanoGPT's train.py, so what it does not say is nanoGPT's default and
not ours. Only what belongs to a machine (device, dtype, compile, backend) is taken from the file
alone: ours are chosen to suit the device.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.config.neighbours import read_names, words_of_values
from nanoray.errors import ConfigError

NAMES = "nanogpt.yaml"  # its settings, and which mean the same here


@dataclass
class Translation:
    """Keys of ours, and where each comes from."""

    keys: dict[str, Any] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)  # keys with nanoGPT's name and value
    defaults: list[str] = field(default_factory=list)  # keys that the file does not have
    lines: list[tuple[str, str]] = field(default_factory=list)  # key or setting, and its line

    def add(self, key: str, value: Any, reason: str) -> None:
        """Set a key of ours; the reason says which settings it comes from."""
        self.keys[key] = value
        self.lines.append((key, f"nanogpt {key} = {value}: {reason}"))

    def take(self, key: str, name: str, value: Any, in_file: bool) -> None:
        """Set a key of ours that means the same as a setting."""
        if not in_file:
            self.keys[key] = value
            self.defaults.append(key)
        elif key == name:
            self.keys[key] = value
            self.unchanged.append(key)
        else:
            self.add(key, value, name)

    def leave(self, name: str, value: Any, reason: str) -> None:
        """Name a setting that has no counterpart."""
        self.lines.append((name, f"nanogpt {name} = {value} is left out: {reason}"))

    def notes(self, given: Collection[str]) -> tuple[str, ...]:
        """Return what to print, without the keys that flags replace."""
        notes = []
        for title, keys in (("as there", self.unchanged), ("its defaults", self.defaults)):
            listed = [f"{key} {self.keys[key]}" for key in keys if key not in given]
            if listed:
                notes.append(f"nanogpt {title}: {', '.join(listed)}")
        notes += [line for key, line in self.lines if key not in given]
        return tuple(notes)


def translate_file(path: Path, given: Collection[str]) -> Translation:
    """Return what a configuration of nanoGPT becomes.

    given: keys of ours that flags set. What they replace is not refused. Raises ConfigError for a
    file that is no such configuration, and for a setting that nanoray could not follow.
    """
    names = read_names(NAMES)
    settings, from_file = _read(path)
    result = Translation()
    for name, key in names["same"].items():
        if "init_from" in given and name in names["of_weights"]:
            continue
        # A context of the file crops that of the weights. nanoGPT's default says nothing about them
        if "init_from" in given and name == "block_size" and name not in from_file:
            continue
        result.take(key, name, settings[name], name in from_file)
    for name in names["of_the_place"]:
        if name in from_file:
            result.take(name, name, settings[name], True)

    _add_batch(settings, result)
    _add_schedule(settings, from_file, path, given, result)
    _add_data(settings, path, given, result)
    _add_start(settings, given, result)
    _add_device(settings, from_file, result)

    # Evaluations and checkpoints
    sequences = int(settings["eval_iters"]) * int(settings["batch_size"])
    result.add("eval_samples", sequences, "eval_iters x batch_size, and the same ones each time")
    result.add("checkpoint_every", settings["eval_interval"], "it saves after evaluations")
    if not settings["always_save_checkpoint"]:
        reason = "the best checkpoint is kept in any case, besides the newest"
        result.leave("always_save_checkpoint", False, reason)
    _name_what_is_left(settings, from_file, result)
    return result


def _read(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Return all settings, and the names of those that the file has."""
    found = read_assignments(path)
    defaults: dict[str, Value] = read_names(NAMES)["defaults"]
    settings = dict(defaults)
    for name, value in found.values.items():
        if name in defaults:
            _require_kind(path, found.lines[name], name, value, defaults[name])
            settings[name] = value
        elif name not in found.used:
            _refuse_name(path, found.lines[name], name)

    for name, text in found.unread.items():
        if name not in defaults:
            continue  # only a setting would have an effect
        # The name of a run at a tracker is often made of the time, and has no effect here
        if name.startswith("wandb_"):
            settings[name] = text
            continue
        raise ConfigError(
            f"{path}, line {found.lines[name]}: {name} = {text} would have to be run, and nothing "
            "is; write its value"
        )
    from_file = {name for name in (*found.values, *found.unread) if name in defaults}
    return settings, from_file


def _require_kind(path: Path, line: int, name: str, value: Value, default: Value) -> None:
    """Raise ConfigError for a text in the place of a number, or for a number in that of a text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wrong = type(default) in (int, float) and not is_number
    if isinstance(default, bool) or name == "compile":
        wrong = not isinstance(value, bool | int)
    if isinstance(default, str) or name in ("backend", "device", "dtype"):
        wrong = not isinstance(value, str)
    if wrong:
        raise ConfigError(
            f"{path}, line {line}: {name} = {value!r} has the type {type(value).__name__}; write a value "
            f"such as {default!r}"
        )


def _refuse_name(path: Path, line: int, name: str) -> None:
    close = difflib.get_close_matches(name, read_names(NAMES)["defaults"], 1, 0.75)
    hint = f"did you mean {close[0]}?" if close else "drop it, or give our key as a flag"
    raise ConfigError(f"{path}, line {line}: {name} is no setting of nanoGPT's train.py; {hint}")


def _add_batch(settings: dict[str, Any], result: Translation) -> None:
    micro = settings["batch_size"]
    accumulated = settings["gradient_accumulation_steps"]
    result.add("micro_batch_size", micro, "batch_size, of a rank in one forward pass")
    # nanoGPT divides gradient_accumulation_steps by the number of ranks
    result.add(
        "global_batch_size",
        micro * accumulated,
        f"batch_size {micro} x gradient_accumulation_steps {accumulated}, on any number of ranks",
    )


def _add_schedule(
    settings: dict[str, Any],
    from_file: set[str],
    path: Path,
    given: Collection[str],
    result: Translation,
) -> None:
    steps = settings["max_iters"]
    if not settings["decay_lr"]:
        result.add("max_steps", steps, "max_iters")
        result.add("schedule", "constant", "decay_lr = False")
        result.add("warmup_steps", 0, "decay_lr = False has no warm-up")
        result.add("min_lr", 0.0, "decay_lr = False never reaches it")
        return

    decay = settings["lr_decay_iters"]
    has_length = bool({"max_steps", "num_epochs"} & set(given))
    result.add("schedule", "cosine", "decay_lr = True")
    result.add("warmup_steps", settings["warmup_iters"], "warmup_iters")
    result.take("min_lr", "min_lr", settings["min_lr"], "min_lr" in from_file)
    if decay < steps and not has_length:
        raise ConfigError(
            f"{path}: lr_decay_iters = {decay} is below max_iters = {steps}, and our schedule ends "
            f"with the run: no steps follow at min_lr; give --max_steps {decay} or {steps}"
        )
    if decay == steps:
        result.add("max_steps", steps, "max_iters, and lr_decay_iters")
        return
    # A rate that is still falling when the run ends: the schedule is longer than the run
    result.add("max_steps", decay, "lr_decay_iters, where the schedule ends")
    if decay > steps and not has_length:
        result.add("stop_at", steps, "max_iters, before the schedule ends")


def _add_data(
    settings: dict[str, Any], path: Path, given: Collection[str], result: Translation
) -> None:
    """Find the folder that nanoGPT's data/NAME/prepare.py has written, or a text of the same name."""
    if "dataset" in given:
        return
    name = settings["dataset"]
    places = [Path("data", name), path.resolve().parent.parent / "data" / name]
    for folder in places:
        if (folder / "train.bin").is_file():
            result.add("dataset", str(folder), f"dataset = {name}, as its prepare.py wrote it")
            # Without a vocabulary beside them, tokens are GPT-2's
            own = (folder / "meta.pkl").is_file() or (folder / "meta.json").is_file()
            if not own:
                result.add("tokenizer", "gpt2", f"{folder} has no meta.pkl")
            return
    tokenizers = read_names(NAMES)["texts"]
    if name in tokenizers:
        result.add("dataset", "shakespeare", f"dataset = {name}, as text")
        result.add("tokenizer", tokenizers[name], f"dataset = {name}")
        return
    raise ConfigError(
        f"dataset = {name} of {path} is no folder with a train.bin ({' and '.join(map(str, places))} "
        "have none); give --dataset FOLDER"
    )


def _add_start(settings: dict[str, Any], given: Collection[str], result: Translation) -> None:
    start = settings["init_from"]
    if start == "scratch" or {"init_from", "resume"} & set(given):
        return
    if start == "resume":
        result.add("resume", "auto", "init_from = 'resume'")
        return
    raise ConfigError(
        f"init_from = {start!r} would download weights; make a folder of them with `hf download "
        f"openai-community/{start}`, and give --init_from FOLDER"
    )


def _add_device(settings: dict[str, Any], from_file: set[str], result: Translation) -> None:
    device = settings["device"]
    if "device" in from_file:
        kind = device.partition(":")[0]
        if kind not in ("cuda", "cpu"):
            raise ConfigError(f"device = {device!r} is no device of nanoray; use cuda or cpu")
        if kind == device:
            result.take("device", "device", kind, True)
        else:
            result.add("device", kind, f"device = {device!r}; ranks choose their card")
        # On a CPU nothing is cast, whatever dtype says
        if kind == "cpu":
            result.add("precision", "fp32", "device = 'cpu' computes in float32 there")
            if "dtype" in from_file:
                result.leave("dtype", settings["dtype"], "nanoGPT does not follow it on a CPU")
            return
    if "dtype" not in from_file:
        return
    dtype = settings["dtype"]
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype = {dtype!r} is none of float32, bfloat16, float16; mend it")
    result.add("precision", words_of_values()["precision"][dtype], f"dtype = {dtype!r}")
    if dtype == "float32":
        reason = "on a GPU nanoGPT multiplies such numbers in tf32, as --precision tf32 does"
        result.lines.append(("precision", f"nanogpt dtype = {dtype!r}: {reason}"))


def _name_what_is_left(settings: dict[str, Any], from_file: set[str], result: Translation) -> None:
    if settings["eval_only"]:
        raise ConfigError(
            "eval_only = True trains nothing; drop it, or look at a run with `nanoray checkpoint "
            "show RUN`"
        )
    if settings["wandb_log"]:
        result.add("track", "wandb", "wandb_log = True")
    if "wandb_project" in from_file:
        reason = "the variable WANDB_PROJECT says it, with track wandb"
        result.leave("wandb_project", settings["wandb_project"], reason)
    if "wandb_run_name" in from_file:
        reason = "the run has the name of the file, or --name"
        result.leave("wandb_run_name", settings["wandb_run_name"], reason)


# Read a Python file of assignments without running it.
#
# Literals count, and simple arithmetic of literals and of names that are assigned above. Nothing is
# called, imported or looked up anywhere else.


Value = str | int | float | bool | None

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 10**18  # of a number, so that no expression takes long
_LARGEST_EXPONENT = 60


class _NotLiteral(Exception):
    """An expression is more than literals and arithmetic."""


@dataclass
class Assignments:
    """What a file assigns."""

    values: dict[str, Value] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)  # name -> its expression, which is code
    used: set[str] = field(default_factory=set)  # names in expressions below them
    lines: dict[str, int] = field(default_factory=dict)


def read_assignments(path: Path) -> Assignments:
    """Return what a file assigns. Raises ConfigError for a file that holds anything else."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not Python: {reason}; check the file") from None

    found = Assignments()
    for node in tree.body:
        _read_statement(node, found, path)
    return found


def _read_statement(node: ast.stmt, found: Assignments, path: Path) -> None:
    # An import is for code, which is not run. A text by itself is a comment
    is_comment = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_comment or isinstance(node, ast.Import | ast.ImportFrom):
        return
    target: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    if isinstance(node, ast.AnnAssign):
        target = node.target
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
        raise ConfigError(
            f"{path}, line {node.lineno}: only NAME = VALUE is read, and nothing is run; write the "
            "value there, or a YAML file for --config"
        )
    if node.value is None:
        return

    name = target.id
    found.lines[name] = node.lineno
    found.values.pop(name, None)
    found.unread.pop(name, None)
    try:
        found.values[name] = _evaluate(node.value, found)
    except _NotLiteral:
        found.unread[name] = ast.unparse(node.value)
    except (ArithmeticError, TypeError) as error:
        raise ConfigError(
            f"{path}, line {node.lineno}: {name} = {ast.unparse(node.value)} has no value "
            f"({error}); mend it"
        ) from None


def _evaluate(node: ast.expr, found: Assignments) -> Value:
    """Return the value of an expression. Raises _NotLiteral, or what its arithmetic raises."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in found.values:
        found.used.add(node.id)
        return found.values[node.id]
    if isinstance(node, ast.UnaryOp):
        return _evaluate_sign(node, found)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _BINARY:
        raise _NotLiteral

    left = _evaluate(node.left, found)
    right = _evaluate(node.right, found)
    # Texts can be joined. All other arithmetic is of numbers
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
        return left + right
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise _NotLiteral
    if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
        raise OverflowError("the exponent is too large")
    value: Value = _BINARY[type(node.op)](left, right)
    if not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise OverflowError("the number is too large")
    return value


def _evaluate_sign(node: ast.UnaryOp, found: Assignments) -> Value:
    value = _evaluate(node.operand, found)
    if isinstance(node.op, ast.Not) and isinstance(value, bool):
        return not value
    if isinstance(value, int | float) and isinstance(node.op, ast.USub):
        return -value
    if isinstance(value, int | float) and isinstance(node.op, ast.UAdd):
        return value
    raise _NotLiteral
