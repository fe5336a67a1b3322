"""Report a run to Aim with a callback of one's own. Needs `pip install aim`, for Python 3.12 or older.

python examples/aim_callback.py, then `aim up --repo runs`

Copy AimCallback into your script. It runs in the thread that trains, so what Aim takes for a record is
the step's; W&B and MLflow, with `--track`, have a thread of their own.
"""

from collections.abc import Mapping
from typing import Any

import aim
import torch
from own_model import points
from torch import nn

import nanoray


class AimCallback(nanoray.Callback):
    """Reports configuration, metrics and results to a repository beside the run's folder."""

    def __init__(self, experiment: str = "nanoray") -> None:
        self.experiment = experiment

    def on_run_start(self, run: nanoray.Run) -> None:
        folder = run.spec.folder
        repo = folder.parent
        if not (repo / ".aim").exists():
            aim.Repo.from_path(str(repo), init=True)

        # A resume, and another process that becomes rank 0, continue the same run of Aim.
        known = folder / "aim.txt"
        self.run = aim.Run(
            run_hash=known.read_text() if known.exists() else None,
            repo=str(repo),
            experiment=self.experiment,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        known.write_text(self.run.hash)
        self.run.name = folder.name
        # Without the values of environment variables, which may be keys and passwords
        config = run.spec.config.model_dump()
        self.run["config"] = config | {"env": sorted(config["env"])}

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                self.run.track(value, name=name, step=step)

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        names = ("exit_reason", "step", "train_loss", "val_loss", "train_s")
        self.run["results"] = {
            name: outcome[name] for name in names if outcome.get(name) is not None
        }
        self.run.close()

    def on_exception(self, error: BaseException) -> None:
        # Only the class: a message may quote the script's data.
        self.run["results"] = {"exit_reason": f"failed: {type(error).__name__}"}
        self.run.close()


def main(run: nanoray.Run) -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    loss_fn = nn.functional.cross_entropy
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn, callbacks=[AimCallback()])
    engine.fit(points(20_000, seed=1), points(2_000, seed=2), steps=120)


if __name__ == "__main__":
    config = {"name": "aimed", "global_batch_size": 96, "eval_every": 40, "max_steps": 120}
    # ray=False: one rank, in this process
    raise SystemExit(nanoray.launch(main, config, ray=False))
