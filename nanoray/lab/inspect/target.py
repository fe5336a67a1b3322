"""What `nanoray inspect` looks at: a run, one of its checkpoints, a configuration, or a script with
its own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.checkpoint.resume import find_resume
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.cli import parse_args
from nanoray.cli.forecast.probe import Loss
from nanoray.cli.run_plan import known_dataset
from nanoray.config import Config, did_you_mean, preset_names, resolve_batch
from nanoray.config.choose import choose_attention, choose_precision
from nanoray.config.layout import Layout
from nanoray.config.mesh import AXES
from nanoray.config.settings import FLAG
from nanoray.data.dataset import DatasetInfo, script_data
from nanoray.data.prepare import prepare
from nanoray.errors import CheckpointError, ConfigError
from nanoray.lab.script_file import run_until_launch
from nanoray.machine.atomic import read_json
from nanoray.machine.host import cpu_features
from nanoray.models.build import build_model
from nanoray.models.precision import weight_type
from nanoray.script.program import call_until_fit
from nanoray.script.settings import DEFAULTS, loaded_of
from nanoray.script.task import ScriptTask

PROG = "nanoray inspect"
NAMED_BY_TARGET = "TARGET names the configuration, and inspect starts nothing; drop it"
WHOLE_MODEL = (
    "inspect shows the whole model; drop it, or see what each rank has with "
    "`python -m nanoray.launch --dry_run`"
)
# Flags of a run that have no effect here, and why
NO_EFFECT = {
    "--config": NAMED_BY_TARGET,
    "--preset": NAMED_BY_TARGET,
    "--resume": NAMED_BY_TARGET,
    "--dry_run": NAMED_BY_TARGET,
    "--quiet": NAMED_BY_TARGET,
    "--verbose": NAMED_BY_TARGET,
    "--topology": NAMED_BY_TARGET,
    "--memory_gb": NAMED_BY_TARGET,
    "--dp_mode": WHOLE_MODEL,
    "--replicas": WHOLE_MODEL,
    **{f"--{axis.key}": WHOLE_MODEL for axis in AXES},
}


@dataclass(frozen=True)
class InspectTarget:
    """A model with all that is known of it. `example` is one micro batch: its shapes count, and of
    a script its values.

    `model` takes no memory, but for a script's own, which is the real one.
    """

    title: str
    config: Config  # with the precision and the kernels that it is computed with
    why: str  # that precision
    dataset: DatasetInfo
    micro: int  # samples of a micro batch
    model: nn.Module
    example: tuple[Any, Any]
    loss: Loss = lambda model, x, y: model(x, y)
    optimizer: torch.optim.Optimizer | None = None  # of a script
    state: StateDict | None = None
    checkpoint: Path | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def script(self) -> bool:
        """Whether the model is the real one of a script."""
        return self.optimizer is not None


def find_target(
    target: str, flags: list[str], ready: bool = False, arguments: Sequence[str] = ()
) -> InspectTarget:
    """Return what `target` names, with `flags` laid over its configuration. Raises NanorayError.

    `ready`: with data that can be read here. `arguments`: of a script.
    """
    path = Path(target).expanduser()
    script = path.suffix == ".py" and path.is_file()
    _refuse_ignored(flags)
    if script:
        return _of_script(path, arguments, flags)
    what = "Dump a model"
    if path.is_dir():
        config = parse_args(["--resume", str(path), *flags], PROG, what).config
        return _of_run(path, config)
    if path.is_file():
        config = parse_args(["--config", str(path), *flags], PROG, what).config
    else:
        if target not in preset_names():
            raise ConfigError(
                f"{target} is no folder of a run, no file and no preset; "
                f"{did_you_mean(target, preset_names())}"
            )
        config = parse_args(["--preset", target, *flags], PROG, what).config
    if config.model == "own":
        raise ConfigError(
            "model = own has no model without its script; give the script: nanoray inspect "
            "SCRIPT.py"
        )
    dataset = prepare(config) if ready else known_dataset(config)
    return _described(target, config, dataset)


def _refuse_ignored(flags: list[str]) -> None:
    """Raise ConfigError for a flag of a run that would have no effect here."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in NO_EFFECT:
            raise ConfigError(f"{name} would be ignored: {NO_EFFECT[name]}")


def _of_run(path: Path, config: Config) -> InspectTarget:
    """Return a run with its newest valid checkpoint, or a checkpoint; without any, the run's
    configuration.
    """
    if config.model == "own":
        raise ConfigError(
            f"the model of {path} is a script's own; give that: nanoray inspect SCRIPT.py"
        )
    found = None
    notes = []
    try:
        found = find_resume(path, str(path), {})
    except CheckpointError as error:
        if not (path / "config.json").is_file():
            raise
        notes.append(f"without weights: {error}")
    ranks = None
    if found:
        notes += found.notes
        saved = found.state.meta
        ranks = saved["world_size"]
        decided = saved.get("config") or {}
        # `auto` was decided on the machine of the run, which may differ from this one.
        update = {
            key: decided[key]
            for key in ("precision", "attention")
            if getattr(config, key) == "auto" and key in decided
        }
        config = config.model_copy(update=update)
        dataset = DatasetInfo.from_dict(saved["dataset"])
    else:
        dataset = _dataset_of_run(path) or known_dataset(config)
    made = _described(path.resolve().name, config, dataset, ranks)
    state = found.state if found else None
    checkpoint = found.path if found else None
    return replace(made, state=state, checkpoint=checkpoint, notes=[*notes, *made.notes])


def _dataset_of_run(path: Path) -> DatasetInfo | None:
    with suppress(ValueError, KeyError):
        return DatasetInfo.from_dict(read_json(path / "run.json")["dataset"])
    return None


def _described(
    title: str, config: Config, dataset: DatasetInfo, ranks: int | None = None
) -> InspectTarget:
    """Return a model of nanoray's own, on the meta device. `ranks`: those that have trained it."""
    wanted, features = config.precision, cpu_features()
    why = "asked for"
    if wanted == "auto":
        precision, why = choose_precision(config, "cpu", features)
        config = config.model_copy(update={"precision": precision})
    if config.model == "gpt":
        config = config.model_copy(
            update={"attention": choose_attention(config, "cpu", config.precision, features)}
        )
    layout = Layout.of(config, ranks or _workers_of(config))
    micro = resolve_batch(config, layout.dp).micro
    with torch.device("meta"):
        model = build_model(config, dataset.vocab_size).to(weight_type(config.precision))
    return InspectTarget(title, config, why, dataset, micro, model, example_of(config, micro))


def _workers_of(config: Config) -> int:
    """Return the ranks of a configuration; where any number will do, the least that divide so."""
    if isinstance(config.workers, int):
        return config.workers
    least = config.replica_ranks * config.ep
    if config.replicas > 1:
        # A group of one data rank shards nothing.
        least *= 2 * config.replicas
    return least


def example_of(config: Config, micro: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a micro batch; only their shapes and types mean anything."""
    if config.model == "resnet":
        return torch.zeros(micro, 3, 32, 32), torch.zeros(micro, dtype=torch.long)
    tokens = torch.zeros(micro, config.block_size, dtype=torch.long)
    return tokens, tokens.clone()


def _of_script(path: Path, arguments: Sequence[str], flags: list[str]) -> InspectTarget:
    """Run a script up to its `fit`, and take its model, optimizer, loss and first micro batch."""
    flagged = parse_args(flags, PROG, "Dump a model", base=dict(DEFAULTS))
    if flagged.config.model != "own":
        raise ConfigError(
            f"model = {flagged.config.model} would be ignored: {path} brings its own; drop --model"
        )
    found: list[InspectTarget] = []

    def call_main(main: Callable[..., Any], given: Any) -> None:
        loaded = loaded_of(given)
        over = {key: getattr(flagged.config, key) for key in flagged.given}
        config = loaded.set(over, FLAG).config
        ranks = config.workers if isinstance(config.workers, int) else 1
        call_until_fit(main, config, loaded.given | flagged.given, ranks, take_target)

    def take_target(task: ScriptTask) -> None:
        decided, batch, example = task.example()
        precision = "fp32" if decided.precision == "auto" else decided.precision
        model = task.model()
        found.append(
            InspectTarget(
                path.name,
                decided.model_copy(update={"precision": precision}),
                "of the script",
                script_data(),
                batch.micro,
                model,
                example,
                task.mean_loss,
                task.optimizer(model, None),
            )
        )

    run_until_launch(str(path), arguments, call_main)
    return found[0]
