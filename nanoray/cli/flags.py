"""From a command line to a Config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.cli.help import asked_for, format_help
from nanoray.cli.parsers import COMMAND_FLAGS, SCALE_FLAGS, build_parser, flag_names
from nanoray.config import (
    Settings,
    load_settings,
    read_yaml,
    refuse_unknown_key,
)
from nanoray.config.conflicts import refuse
from nanoray.config.json_schema import schema_text
from nanoray.config.load import flatten, read_mapping, run_folder_of
from nanoray.config.merge import keep_init_from, lay_over
from nanoray.config.paths import expand, expand_paths
from nanoray.config.settings import FLAG, OF_ONE_COMMAND, RUN
from nanoray.errors import ConfigError
from nanoray.machine.storage.store import StorageError, Store
from nanoray.machine.storage.url import is_url, problem_of, run_of

# Flags of the command itself that are paths on this machine
COMMAND_PATHS = frozenset({"config", "topology"})

# Keys that --resume does not take from config.json: those of one command, and how many ranks it has
_NOT_INHERITED = (*OF_ONE_COMMAND, "workers")


@dataclass(frozen=True)
class Scale:
    """The scale of a dry run that takes none of this machine's devices."""

    world_size: int
    topology: str | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Loaded(Settings):
    """Settings as a command line gave them, and what it asked of the command itself."""

    dry_run: bool = False
    scale: Scale | None = None  # of a dry run that takes none of this machine's devices
    quiet: bool = False  # print warnings, faults and the result only
    verbose: bool = False  # list who has set each key


def parse_args(
    argv: list[str],
    prog: str,
    about: str,
    base: dict[str, Any] | None = None,
    elsewhere: bool = False,
) -> Loaded:
    """Turn a command line into a Config.

    `--help` prints the text `about`, in which {prog} stands for `prog`, and the most common flags.
    `--schema` prints a JSON schema. Both exit 0.

    `base` has values in the place of a preset's and a file's, which are refused then. `elsewhere`:
    another machine will load it. Raises ConfigError.
    """
    topic = asked_for(argv)
    if topic is not None:
        print(format_help(topic, prog, about), end="")
        raise SystemExit(0)
    parser = build_parser(prog)
    known, unknown = parser.parse_known_args(with_underscores(argv))
    if unknown:
        _refuse_words(unknown)
    if "schema" in known:
        print(schema_text(), end="")
        raise SystemExit(0)

    # What remains in `flags` after this are keys of the configuration. A shell expands no ~ within
    # a word, such as --config=~/x.yaml. The command's own files are here, wherever the ranks train
    flags = vars(known) if elsewhere else expand_paths(vars(known))
    for key in COMMAND_PATHS & flags.keys():
        flags[key] = expand(key, flags[key])
    file = flags.pop("config", None)
    preset = flags.pop("preset", None)
    dry_run = flags.pop("dry_run", False)
    quiet = flags.pop("quiet", False)
    verbose = flags.pop("verbose", False)
    scale_flags = {key: flags.pop(key) for key in SCALE_FLAGS if key in flags}
    scale = _parse_scale(scale_flags, dry_run, flags)

    if quiet and dry_run:
        raise ConfigError(
            "quiet would be ignored: a dry run prints its plan and nothing else; drop --quiet"
        )
    if base:
        _refuse_files({"config": file, "preset": preset}, prog)
        settings = _lay_flags(base, dict.fromkeys(base, prog), flags)
    else:
        settings = _load(file, preset, flags, elsewhere)
    refuse(settings.config, typed=flags)
    return Loaded(
        settings.config,
        settings.given,
        dry_run,
        scale,
        quiet,
        verbose,
        origins=settings.origins,
        notes=settings.notes,
    )


def with_underscores(argv: list[str]) -> list[str]:
    """Return a command line with flags such as --max-steps as nanoray spells them."""
    known = {*flag_names(), *COMMAND_FLAGS}
    words = []
    for word in argv:
        name, sign, value = word.removeprefix("--").partition("=")
        underscored = name.replace("-", "_")
        if word.startswith("--") and underscored in known:
            word = f"--{underscored}{sign}{value}"
        words.append(word)
    return words


def _refuse_words(words: list[str]) -> None:
    """Raise ConfigError for words of a command line that are no flags of ours, and no values."""
    word = words[0]
    if not word.startswith("-"):
        raise ConfigError(
            f"{word} is the value of no flag; flags begin with --, and a pattern needs quotes"
        )

    refuse_unknown_key(word.partition("=")[0], (*flag_names(), *COMMAND_FLAGS))


def _load(
    file: str | None, preset: str | None, flags: dict[str, Any], elsewhere: bool = False
) -> Settings:
    """Return the settings of file, preset and flags, or of the run that is resumed."""
    if file or preset:
        return load_settings(file, preset, flags, elsewhere=elsewhere)
    resume = str(flags.get("resume", "none"))
    if is_url(resume):
        values, origins = ({}, {}) if elsewhere else _layer_at(resume)
    else:
        values, origins = _layer_of_run(resume)
    if not values:
        return load_settings(file, preset, flags, elsewhere=elsewhere)
    if flags.get("init_from"):
        flags["init_from"] = keep_init_from(values, flags, Path(flags["resume"]))
    return _lay_flags(values, origins, flags)


def _lay_flags(
    values: dict[str, Any], origins: Mapping[str, str], flags: dict[str, Any]
) -> Settings:
    """Return the settings of values that `origins` have set, below flags."""
    merged = lay_over(values, flags, "the flags")
    return Settings.of(merged, [(origins, values), (FLAG, flags)], frozenset(flags))


def _layer_of_run(resume: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the run that `--resume PATH` names passes on; nothing if it names none.

    PATH is the run's folder, or one of its checkpoints.
    """
    folder = run_folder_of(resume)
    if folder is None:
        return {}, {}
    values = read_yaml(folder / "config.json")
    record = folder / "run.json"
    return _inherited(values, read_mapping(record) if record.is_file() else {}, folder.name)


def _layer_at(url: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the run at a URL passes on.

    Every rank reads these two small files. Raises ConfigError.
    """
    problem = problem_of("resume", url)
    named = run_of(url)
    if problem or named is None:
        raise ConfigError(problem)
    run, _ = named
    try:
        store = Store(run)
        values = store.read_json("config.json") or {}
        record = store.read_json("run.json") or {}
    except StorageError as error:
        raise ConfigError(f"resume = {url}: {error}") from None
    return _inherited(flatten(values), record, run.rpartition("/")[2])


def _inherited(
    values: dict[str, Any], record: Mapping[str, Any], run: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys that a resume takes from a run's config.json, and who has set them.

    record: its run.json, as its command has written it.
    """
    inherited = {key: value for key, value in values.items() if key not in _NOT_INHERITED}
    by = f"{RUN}{run}"
    origins = {
        key: f"{by}: {str(origin).removeprefix(f'{by}: ')}"
        for key, origin in record.get("origins", {}).items()
        if key in inherited
    }
    began = record.get("config", inherited)
    edited = [key for key in inherited if began.get(key, inherited[key]) != inherited[key]]
    return inherited, origins | dict.fromkeys(edited, "edited in config.json")


def _refuse_files(files: Mapping[str, str | None], prog: str) -> None:
    """Raise ConfigError for a file or preset where the command's own script has the values."""
    for key, value in files.items():
        if value:
            raise ConfigError(
                f"{key} = {value} would be ignored: {prog} is configured from flags alone; drop "
                f"--{key}"
            )


def _parse_scale(given: dict[str, Any], dry_run: bool, flags: dict[str, Any]) -> Scale | None:
    """Return the values of SCALE_FLAGS. Raises ConfigError for those that would be ignored."""
    if not given:
        return None

    key, value = next(iter(given.items()))
    if not dry_run:
        raise ConfigError(
            f"{key} = {value} would be ignored without --dry_run; add it, or drop --{key}"
        )
    if "world_size" not in given:
        raise ConfigError(
            f"{key} = {value} would be ignored without --world_size; add it, or drop --{key}"
        )
    if "workers" in flags:
        raise ConfigError(
            f"workers = {flags['workers']} and world_size = {given['world_size']} both say how "
            "many ranks; drop one"
        )

    world_size = given["world_size"]
    memory_gb = given.get("memory_gb")
    if world_size < 1:
        raise ConfigError(f"world_size = {world_size} is not above 0")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigError(f"memory_gb = {memory_gb} is not above 0")
    return Scale(world_size, given.get("topology"), memory_gb)
