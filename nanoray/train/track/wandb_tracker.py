"""Weights & Biases: `--track wandb`, and nanoray.WandbCallback."""

from __future__ import annotations

import netrc
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from nanoray.errors import ConfigError
from nanoray.train.track.tracker import Results, TrackedRun, Tracker

FINISH_S = 20  # how long W&B may go on to upload at the end; `wandb sync` sends the rest
PUBLIC_HOST = "https://api.wandb.ai"
Mode = Literal["online", "offline", "disabled", "shared"]
WITHOUT_NETWORK = ("offline", "disabled", "dryrun")  # modes that need no key


class WandbTracker(Tracker):
    """A run of Weights & Biases. Its files are in the run's folder, below wandb/."""

    kind: ClassVar[str] = "wandb"
    packages: ClassVar[tuple[str, ...]] = ("wandb",)

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Mode | None = None,
    ) -> None:
        if mode not in (None, *get_args(Mode)):
            raise ConfigError(
                f"mode = {mode} is none of W&B's: {', '.join(get_args(Mode))}; give one of them"
            )
        self._project = project or os.environ.get("WANDB_PROJECT") or "nanoray"
        self._name = name
        self._entity = entity
        self._group = group
        self._tags = list(tags)
        self._mode = mode
        self._run: Any = None

    @property
    def key(self) -> str:
        return f"{self.kind}/{self._project}"

    @property
    def mode(self) -> str:
        """The mode that W&B will be in: online, offline, disabled or shared."""
        return self._mode or os.environ.get("WANDB_MODE") or "online"

    def problem(self, run: TrackedRun) -> str | None:
        if self.missing():
            return self.missing()
        import wandb  # now, and not beside the first steps  # noqa: F401

        if self.mode in WITHOUT_NETWORK or _has_key():
            return None
        return (
            "track = wandb finds no API key of Weights & Biases for this process: neither "
            "WANDB_API_KEY nor a netrc file has one; run `wandb login`, pass the shell's key on "
            "with --env WANDB_API_KEY, or set WANDB_MODE=offline"
        )

    def start(self, run: TrackedRun, keep_id: Callable[[str], None]) -> str:
        import wandb

        # Chosen here, and kept before W&B is called: a process that is killed meanwhile must not
        # leave a second run behind.
        run_id = run.known_id or secrets.token_hex(4)
        keep_id(run_id)
        settings = wandb.Settings(
            silent=True,  # the console is the run's own
            console="off",  # and W&B captures nothing of it
            finish_timeout=FINISH_S,  # also at the end of Python
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags or None,
            name=self._name or run.name,
            id=run_id,
            resume="allow",
            mode=self._mode,
            config=run.config,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            settings=settings,
            reinit="create_new",  # a run that the program itself has begun stays as it is
        )
        # The x axis is our step. W&B's own only grows, and would drop the steps that a resume or a
        # rollback repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step", step_sync=True)
        if self.mode == "disabled":
            return "disabled: it writes nothing"
        if not self._run.offline:
            return str(self._run.url)
        folder = shlex.quote(str(Path(self._run.dir).parent))
        return f"offline; `wandb sync {folder}` uploads it"

    def describe(self, units: Mapping[str, str]) -> None:
        known = dict(self._run.config.get("units", {}))
        self._run.config.update({"units": known | dict(units)}, allow_val_change=True)

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, step: int, results: Results) -> None:
        if results.sample:
            import wandb

            table = wandb.Table(columns=["step", "text"], data=[[step, results.sample]])
            self._run.log({"step": step, "sample": table})
            self._run.summary["sample_text"] = results.sample
        self._run.summary.update(results.values)
        exit_code = 0
        if results.status == "failed":
            exit_code = 1
        self._run.finish(exit_code=exit_code)


def _has_key() -> bool:
    """Return whether this process can log in at W&B without a question to the user."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True

    # A program that has called wandb.login(key=...).
    import wandb

    settings = wandb.setup().settings
    if getattr(settings, "api_key", None):
        return True

    # What `wandb login` has written.
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.base_url or PUBLIC_HOST)
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            entry = netrc.netrc(file).authenticators(host.hostname or "")
        except (OSError, netrc.NetrcParseError):
            continue
        if entry:
            return True
    return False
