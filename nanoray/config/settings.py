"""The settings of a run: its configuration, and who has set each key.

    preset ─► weights ─► file ─► flags ─► Config ─► workers ─► run fetched ─► epochs ─► ...

The first steps lay values over each other, until they are a Config (`Settings.of`). Each later one
changes that (`Settings.set`). A step says who it is, so that a dry run, run.json and a resume can say
where a value comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nanoray.config.load import make_config, run_folder_of
from nanoray.config.mesh import AXES
from nanoray.config.schema import Config
from nanoray.machine.storage.url import without_credentials

S = TypeVar("S", bound="Settings")
FLAG = "flag"
DEFAULT = "default"
RUN = "run "  # before the name of the run that a value was inherited from

# Keys that belong to one command, and not to the run that it starts or resumes
OF_ONE_COMMAND = ("resume", "stop_at", "target_loss", "faults", "out_dir")


@dataclass(frozen=True)
class Settings:
    """A configuration, who has set each of its keys last, and what a plan of the run prints."""

    config: Config
    given: frozenset[str] = frozenset()  # keys that the user has set for this command
    # key -> who has set it last. A key that has its default is not there
    origins: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @classmethod
    def of(
        cls: type[S],
        values: Mapping[str, Any],
        layers: Sequence[tuple[str | Mapping[str, str], Mapping[str, Any]]],
        given: frozenset[str] = frozenset(),
    ) -> S:
        """Validate `values`, which these layers have become; the lowest one comes first.

        A layer is who has set its keys (all of them, or each), and the keys. Raises ConfigError.
        """
        origins: dict[str, str] = {}
        for by, layer in layers:
            origins |= _setters(by, [key for key in layer if key in values])

        # A dp_mode that is not set is one that goes with the axes
        notes: tuple[str, ...] = ()
        axes = [axis.key for axis in AXES if not axis.goes_with_ddp]
        axes = [key for key in axes if str(values.get(key, 1)) != "1"]
        is_default = "dp_mode" not in origins and values.get("dp_mode", "ddp") == "ddp"
        if axes and is_default:
            why = f"torch's DDP does not go with {' and '.join(axes)}"
            values = {**values, "dp_mode": "ddp_by_hand"}
            origins["dp_mode"] = why
            notes = (f"mode   dp_mode ddp_by_hand: {why}",)

        config = make_config(dict(values))
        # make_config has left the run where it is
        run = run_folder_of(config.resume)
        if run and "out_dir" not in values:
            origins["out_dir"] = RUN + run.name
        return cls(config, given, origins=origins, notes=notes)

    def set(self: S, values: Mapping[str, Any], by: str | Mapping[str, str]) -> S:
        """Return the settings after a step that sets these keys. Raises ConfigError.

        by: who sets them, or for each key who does. A step that finds a key as it wants it has not
        set it.
        """
        config = self.config
        changed = {key: value for key, value in values.items() if getattr(config, key) != value}
        if not changed:
            return self
        return replace(
            self,
            config=make_config(config.model_dump() | changed),
            origins={**self.origins, **_setters(by, changed)},
        )

    def note(self: S, *lines: str) -> S:
        """Return the settings with more lines for the plan of the run."""
        return replace(self, notes=(*self.notes, *lines))

    def chosen(self) -> list[tuple[str, Any, str]]:
        """Return each key that has not its default, its value, and who has set it.

        Keys have the order of --help.
        """
        return [
            (key, value, origin_of(self.origins, key))
            for key, value in self.config.model_dump(exclude_defaults=True).items()
        ]


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """Return who has set a key."""
    # `micro_batch_size auto` is a field of its own
    if key == "micro_batch_search":
        key = "micro_batch_size"
    return origins.get(key, DEFAULT)


def with_origins(texts: Mapping[str, str], origins: Mapping[str, str]) -> str:
    """Return a text about each of some keys, with who has set it."""
    return ", ".join(f"{text} ({origin_of(origins, key)})" for key, text in texts.items())


def _setters(by: str | Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """Return who sets each of these keys."""
    if isinstance(by, str):
        return dict.fromkeys(keys, by)
    return {key: by[key] for key in keys if key in by}


def lines_of(chosen: Iterable[tuple[str, Any, str]]) -> list[str]:
    """Return a line such as `lr 0.003 (preset shakespeare-cpu)` for each chosen key."""
    return [f"{key} {_as_yaml(public(key, value))} ({by})" for key, value, by in chosen]


def public(key: str, value: Any) -> Any:
    """Return what messages, reports and trackers may show of a value.

    The values of variables in `env` may be keys and passwords, so only their names are shown. A URL
    loses its credentials.
    """
    if key == "env" and isinstance(value, dict):
        return dict.fromkeys(value, "...")
    if isinstance(value, str) and "://" in value:
        return without_credentials(value)
    return value


def public_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command, of variables their names alone: `--env TOKEN`.

    They are shown to others, and the values may be keys and passwords. So given, a variable is
    taken from the environment of the command.
    """
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--env":
            word = word.partition("=")[0]
        elif word.startswith("--env="):
            word = "=".join(word.split("=")[:2])
        shown.append(word)
    return shown


def _as_yaml(value: Any) -> str:
    """Write a value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
