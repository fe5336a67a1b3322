"""nanoGPT's own train.py as a peer, with the same sizes, data, batch and threads.

The user names the folder that holds it. It runs as it is, in float32 and one process. With several
ranks it cannot run without a GPU: it calls torch.cuda.set_device as soon as it finds RANK.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nanoray.bench.harness.processes import Child, ChildFailed
from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo, read_tokens
from nanoray.errors import DataError

LINE = re.compile(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", re.MULTILINE)
SETTLED = 5  # steps that do not count; nanoGPT leaves as many out of the MFU that it prints


class NanoGPT:
    """A folder from which nanoGPT's train.py runs, and its command line for a configuration."""

    def __init__(self, source: Path, config: Config, data: DatasetInfo, folder: Path) -> None:
        """Write train.py's neighbours, the tokens, and meta.pkl with the vocabulary.

        Raises DataError for tokens that do not fit into the only type that nanoGPT reads.
        """
        if data.vocab_size > 1 << 16:
            raise DataError(
                f"{data.name} has a vocabulary of {data.vocab_size}, and nanoGPT reads uint16; "
                "compare with it on another dataset"
            )
        self.folder = folder / "nanogpt"
        tokens = self.folder / "data" / "bench"
        tokens.mkdir(parents=True)
        for file in source.glob("*.py"):
            (self.folder / file.name).symlink_to(file.resolve())
        for split in ("train", "val"):
            # One file without a header
            with (tokens / f"{split}.bin").open("wb") as written:
                for part in data.files(split):
                    for chunk in read_tokens(data.path, part):
                        found = np.frombuffer(chunk, data.dtype)
                        written.write(found.astype(np.uint16).tobytes())
        # It reads its vocabulary's size from a pickle. By hand: ( mark, d dict, V key, I number, s
        # set, . end
        (tokens / "meta.pkl").write_bytes(b"(dVvocab_size\nI%d\ns." % data.vocab_size)
        self._config = config

    def flags(self, **others: object) -> list[str]:
        """Return the flags of train.py, for the recipe of the configuration."""
        c = self._config
        shape = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
        values: dict[str, object] = {key: getattr(c, key) for key in shape}
        values |= {
            "device": "cpu",
            "compile": False,
            "dataset": "bench",
            "out_dir": "out",
            "log_interval": 1,
            "dtype": "float32",  # its default, for GPUs, is a type of 16 bits
            "always_save_checkpoint": False,
            "wandb_log": False,
            "gradient_accumulation_steps": 1,
            "batch_size": c.global_batch_size,
            "max_iters": c.max_steps,
            "lr_decay_iters": c.max_steps,
            "learning_rate": c.lr,
            "min_lr": c.min_lr,
            "beta2": c.beta2,
            "weight_decay": c.weight_decay,
            "warmup_iters": c.warmup_steps,
        }
        return [f"--{key}={value}" for key, value in (values | others).items()]

    def command(self, **others: object) -> list[str]:
        """Return the command that runs train.py in its folder, with further flags."""
        # It imports its neighbours, and executes one of them by a path relative to the folder that
        # it runs in.
        script = f"import os, runpy, sys; os.chdir({str(self.folder)!r}); sys.path.insert(0, '')"
        return [
            sys.executable,
            "-c",
            f"{script}; runpy.run_path('train.py', run_name='__main__')",
            *self.flags(**others),
        ]

    def step_ms(self, steps: int, env: Mapping[str, str], timeout_s: float) -> float:
        """Run `steps` steps, after SETTLED that do not count, and return their median in ms.

        Raises ChildFailed.
        """
        command = self.command(max_iters=SETTLED + steps - 1, eval_interval=10**9, eval_iters=1)
        with Child(command, env, self.folder / "output.log") as child:
            child.wait(timeout_s)
            lines = LINE.findall(child.log.read_text(encoding="utf-8"))
            found = [float(ms) for step, _, ms in lines if int(step) >= SETTLED]
            if not found:
                raise ChildFailed(f"no line `iter N: loss L, time Tms`\n{child.tail()}")
            return statistics.median(found)
