"""`python -m nanoray.bench checkpoint`: what a checkpoint costs, against the speed of the disk.

    raw disk        the same bytes in one file: write and fsync, nothing else; the limit of all others
    nanoray sync    --checkpoint_mode sync: training waits until it is on disk, hashed and renamed
    nanoray async   --checkpoint_mode async: an update waits for a copy
    torch.save      the same tensors, fsync, rename, fsync of the folder: no sums
    dcp.save        torch.distributed.checkpoint with its defaults, as one process
    dcp.async_save  the same in its thread
    dcp stager      dcp.async_save with a DefaultStager that lives as long as training: it keeps its buffers, and copies
                    in a thread (on a GPU into pinned memory); the next update waits for the copy
    dcp process     the same with shared memory, and another process that writes

One process holds a preset's weights and their Adam state and trains a small GPT on one thread at
the same time. Every round runs all arms in turn. Before and after each, steps run without a save.
The training time lost is how much longer the same steps take with a save: the stall, and what the
writing takes from the steps at that time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, measured, whiskers
from nanoray.bench.harness.ranks import Where
from nanoray.bench.harness.report import Emit, Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import rotated
from nanoray.config import Config, load_config
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.environment import environment
from nanoray.parallel.rendezvous import open_store

if TYPE_CHECKING:
    from nanoray.checkpoint.state.state_dict import StateDict

RAW, SYNC, ASYNC, TORCH, DCP, DCP_ASYNC, STAGER, PROCESS = ARMS = (
    *("raw disk", "nanoray sync", "nanoray async"),
    *("torch.save", "dcp.save", "dcp.async_save", "dcp stager", "dcp process"),
)
STALL = "stall"
DONE = "on disk after"
LOST = "training time lost"
RATE = "written"
OF_STALL = "stall, of nanoray sync"
OF_LOST = "lost, of nanoray sync"
OF_DISK = "of raw disk"
# % of a synchronous save
STALL_LIMIT = 6.0
LOST_LIMIT = 12.0
# What is trained: many small operations, so that a writer that holds Python's lock shows
STEP_PRESET = "tiny"
TAIL_STEPS = 5  # steps after a save that still count to it
CHUNK = 8 << 20
NO_SAVE = ("rank0.progress", "attempt")  # files of a run that no checkpoint has written


# The raw write costs training all of its time: it is a limit of the disk, not a way to save.
SAVERS = tuple(arm for arm in ARMS if arm != RAW)


def _draw_bars(
    axes: Any, report: Report, arms: tuple[str, ...], metric: str, offset: float, label: str
) -> None:
    """Draw horizontal bars of one metric, a bar per arm; lines are min to max."""
    rows = measured(report, arms, metric)
    at = [arms.index(row.arm) + offset for row in rows]
    medians = [row.median for row in rows]
    axes.barh(at, medians, xerr=whiskers(rows), height=0.36, label=label, capsize=2)
    axes.set_yticks(range(len(arms)), arms)


def _draw_costs(axes: Any, report: Report) -> None:
    _draw_bars(axes, report, SAVERS, STALL, -0.19, "stall")
    _draw_bars(axes, report, SAVERS, LOST, 0.19, "all training time lost")


def _draw_rates(axes: Any, report: Report) -> None:
    _draw_bars(axes, report, ARMS, RATE, 0, "")


class CheckpointBenchmark(Benchmark):
    """Measure what a checkpoint costs training."""

    # Wrong: tensors that read back with other bits than training had when they were saved
    numbers = (
        Number("rounds", "rounds of all arms", usual=7, few=3),
        Number("threads", "of training; the other cores are free to write", 1),
        Number("timeout_s", "seconds of silence after which a rank has failed", 600.0),
    )
    tables = (
        Table(
            DONE,
            (
                names("arm"),
                TableColumn("stall, s", STALL, SPREAD),
                TableColumn("of sync, %", OF_STALL),
                TableColumn("lost, s", LOST, SPREAD),
                TableColumn("of sync, %", OF_LOST),
                TableColumn("on disk after, s", DONE, SPREAD),
                TableColumn("GB/s", RATE),
                TableColumn("of raw disk, %", OF_DISK),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_costs,
                {"title": "what one checkpoint costs training", "xlabel": "s, median"},
                {"fontsize": 8},
                down=True,
            ),
            Panel(
                _draw_rates,
                {"title": "from the call until it is on disk", "xlabel": "GB/s, median"},
                down=True,
            ),
        ),
        note=("state", "recipe", "disk"),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--device",
            choices=("auto", "cuda", "mig", "cpu"),
            default="auto",
            help="where the state is",
        )
        parser.add_argument(
            "--preset",
            help="whose weights and Adam state [gpt2-124m; with --quick shakespeare-char]",
        )
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="DIR",
            help="write on this disk [the system's temporary folder]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure every arm in turns and fill the report. Everything that is written is removed again."""
        # Refuse before a process starts or a byte is written.
        default = "shakespeare-char" if args.quick else "gpt2-124m"
        preset = args.preset or default
        # A full disk in the middle of a round would fail every arm that follows.
        need = _bytes_of(preset)
        disk = args.folder or Path(tempfile.gettempdir())
        if not disk.is_dir() or not os.access(disk, os.W_OK):
            raise ConfigError(f"folder = {disk}: missing or read-only; make it first")
        free = shutil.disk_usage(disk).free
        if free < 1.5 * need:
            raise ConfigError(
                f"folder = {disk} has {free / 1e9:.2f} GB free, and a checkpoint of preset {preset} "
                f"takes {need / 1e9:.2f}; give a --folder with room for 1.5 of them, or a smaller --preset"
            )
        recipe = f"preset {preset}, {args.rounds} rounds after one to warm up"
        recipe += f", with training on {args.threads} thread(s)"
        report.conditions |= {
            "recipe": recipe,
            "disk": f"{file_system(disk)}, {free / 1e9:.0f} GB free",
        }
        # The window is the time over which training's speed is measured before and after a save.
        order = {
            "preset": preset,
            "rounds": args.rounds,
            "window_s": 0.2 if args.quick else 1.0,
            "threads": args.threads,
        }
        found: dict[str, list[Record]] = {arm: [] for arm in ARMS}
        wrong: dict[str, int | None] = {}
        # One rank saves; its folder is deleted with all that was written.
        where = Where(1, "processes", args.device, timeout_s=args.timeout_s)
        with (
            tempfile.TemporaryDirectory(prefix="nanoray-checkpoint-", dir=disk) as folder,
            ranks_for(report, where, lambda: add_rows(report, found, wrong)) as pool,
        ):
            # Three kinds of events: the state's size, what read back wrong, and a measured save.
            order["folder"] = folder
            for event in pool.run("nanoray.bench.checkpoint:measure_rank", order):
                if "state" in event:
                    report.conditions["state"] = event["state"]
                elif "wrong" in event:
                    wrong[event["arm"]] = event["wrong"]
                else:
                    found[event["arm"]].append(event)
                    times = f"stall {event['stall_s']:.3f} s, on disk after {event['done_s']:.3f} s"
                    say(f"round {event['round']}  {event['arm']:<14} {times}")


def _bytes_of(preset: str) -> int:
    """Return the approximate bytes of a checkpoint.

    It holds the weights, the tied head once more, and two moments, all in float32.
    """
    from nanoray.bench.predicted import shape_of
    from nanoray.models.costs import count_parameters

    shape = shape_of(load_config(preset=preset))
    return 4 * (3 * count_parameters(shape) + shape.vocab_size * shape.n_embd)


def file_system(folder: Path) -> str:
    """Return the kind and mount point of the file system of `folder`; "" where Linux gives none."""
    # Only Linux lists its mounts there.
    try:
        mounts = [
            line.split()[1:3]
            for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        ]
    except OSError:
        return "file system unknown"
    real = folder.resolve()
    # The longest mount point that contains the folder is the one that holds it.
    holding = [
        (len(at), kind, at) for at, kind in mounts if real == Path(at) or Path(at) in real.parents
    ]
    return "{1} at {2}".format(*max(holding)) if holding else "file system unknown"


def add_rows(report: Report, found: dict[str, list[Record]], wrong: dict[str, int | None]) -> None:
    """Add each arm's rows, and its ratios to the sync save and the raw disk of the same round."""

    def shares(values: list[float], of: list[float]) -> list[float]:
        return [100 * value / whole for value, whole in zip(values, of, strict=False)]

    def rates(events: list[Record]) -> list[float]:
        return [e["bytes"] / e["done_s"] / 1e9 for e in events]

    # Nanoray's own synchronous save is what the shares refer to.
    sync = [e["stall_s"] for e in found[SYNC]]
    # Rounds are paired: values of one round saw the same disk.
    for arm, events in found.items():
        note = f"{events[0]['bytes'] / 1e9:.3g} GB" if events else ""
        done = [e["done_s"] for e in events]
        report.add(arm, DONE, "s", done, note, wrong=wrong.get(arm))
        report.add(arm, RATE, "GB/s", rates(events))
        if arm == RAW:
            continue
        note = "paired by round, as the other shares"
        report.add(arm, OF_DISK, "%", shares(rates(events), rates(found[RAW])), note)
        note = f"a step takes {1e3 * events[0]['step_s']:.1f} ms without a save" if events else ""
        stalls, lost = ([e[key] for e in events] for key in ("stall_s", "lost_s"))
        report.add(arm, STALL, "s", stalls)
        report.add(arm, LOST, "s", lost, note)
        for metric, seconds, limit in (
            (OF_STALL, stalls, STALL_LIMIT),
            (OF_LOST, lost, LOST_LIMIT),
        ):
            share = report.add(arm, metric, "%", shares(seconds, sync))
            if arm == ASYNC:
                report.add_target(f"{ASYNC}: {metric}, %", share, "<=", limit)


# On the rank.


def no_wait() -> None:
    """The state may be updated at once."""


class SavingArm(NamedTuple):
    """One way to save."""

    # Save the state as of a step; the result says whether it is on disk
    begin: Callable[[int], Callable[[], bool]]
    read: Callable[[int], Record] | None  # read it back: tensors by name
    # Wait until the state has been copied and may be updated
    copied: Callable[[], object] = no_wait
    close: Callable[[], object] = no_wait


def measure_rank(mesh: Any, order: Record, emit: Emit) -> None:
    """Run the rounds.

    Emits a description of the state, the number of wrong tensors of each arm, and one event per arm
    and round.
    """
    import gc

    import torch

    torch.set_num_threads(order["threads"])
    folder = Path(order["folder"])
    arms, tree = make_arms(mesh, order["preset"], folder)
    size = sum(t.nbytes for t in tree().values())
    emit({"state": f"{size / 1e9:.3g} GB in {len(tree())} tensors on {mesh.device}"})
    step = make_step(mesh.device)

    def seconds_per_step(window_s: float) -> float:
        start = time.perf_counter()
        steps = 0
        elapsed = 0.0
        while elapsed < window_s or steps < TAIL_STEPS:
            step()
            steps += 1
            elapsed = time.perf_counter() - start
        return elapsed / steps

    seconds_per_step(order["window_s"])
    for turn in range(order["rounds"] + 1):
        for arm in rotated(ARMS, turn):
            # The speed of training before the save
            gc.collect()
            before = seconds_per_step(order["window_s"])

            # Save, and train until it is on disk
            start = time.perf_counter()
            steps = 0
            done = arms[arm].begin(turn)
            stall_s = time.perf_counter() - start
            while not done():
                stall_s += step(arms[arm].copied)
                steps += 1
            done_s = time.perf_counter() - start

            # A writer may still slow down the next steps
            for _ in range(TAIL_STEPS):
                step()
            elapsed_s = time.perf_counter() - start

            # The speed may have changed meanwhile: take the mean of before and after
            step_s = (before + seconds_per_step(order["window_s"])) / 2
            read = arms[arm].read
            if turn:
                files = [path for path in folder.rglob("*") if path.name not in NO_SAVE]
                event = {
                    "arm": arm,
                    "round": turn,
                    "stall_s": stall_s,
                    "done_s": done_s,
                    "step_s": step_s,
                    "lost_s": elapsed_s - (steps + TAIL_STEPS) * step_s,
                    "bytes": sum(path.stat().st_size for path in files),
                }
                emit(event)
            elif read:
                # The first turn does not count; its files are read back and compared
                back = read(turn)
                wrong = [name for name, t in tree().items() if not same_bits(t, back.get(name))]
                emit({"arm": arm, "wrong": len(wrong)})
                del back
            for path in folder.iterdir():
                if path.name in ("logs", "attempt"):
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    for each in arms.values():
        each.close()


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether a tensor came back with the same shape, kind and bits."""
    import torch

    if theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    return torch.equal(
        *(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
    )


def make_step(device: Any) -> Callable[..., float]:
    """Return a real training step of a small GPT, which waits for the device.

    The step returns for how many seconds its update waited for what it was given: the copy of an
    earlier state.
    """
    import torch

    from nanoray.bench.predicted import shape_of
    from nanoray.models.gpt import GPT
    from nanoray.observe.trace.recorder import wait_for
    from nanoray.train.optim.groups import make_optimizer

    cfg = load_config(preset=STEP_PRESET)
    gpt = GPT(shape_of(cfg), 0.0).to(device)
    optimizer = make_optimizer(gpt, cfg)
    size = (cfg.global_batch_size, cfg.block_size)
    x = torch.randint(65, size, device=device)  # (B, T)
    y = torch.randint(65, size, device=device)  # (B, T)

    def step(copied: Callable[[], object] = no_wait) -> float:
        gpt(x, y).backward()
        start = time.perf_counter()
        copied()
        waited_s = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait_for(device)
        return waited_s

    return step


def make_arms(
    mesh: Any, preset: str, folder: Path
) -> tuple[dict[str, SavingArm], Callable[[], Record]]:
    """Return the arms, and a function that returns the state that all of them save to `folder`."""
    import torch
    import torch.distributed.checkpoint as dcp

    from nanoray.bench.predicted import shape_of
    from nanoray.checkpoint.state.optimizers import optimizer_tensors
    from nanoray.models.gpt import GPT
    from nanoray.parallel.pieces import whole_shards
    from nanoray.train.optim.groups import make_optimizer

    cfg = load_config(
        preset=preset,
        overrides={"optimizer": "adamw", "checkpoint_every": 1, "keep_checkpoints": 1},
    )
    torch.manual_seed(cfg.seed)
    gpt = GPT(shape_of(cfg), 0.0).to(mesh.device)
    optimizer = make_optimizer(gpt, cfg)
    for p in gpt.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()  # moments of every parameter
    optimizer.zero_grad(set_to_none=True)

    def tree() -> dict[str, torch.Tensor]:
        return _flat(gpt.state_dict(), optimizer_tensors(optimizer, whole_shards(gpt)))

    def at_once(write: Callable[[], object]) -> Callable[[int], Callable[[], bool]]:
        def begin(step: int) -> Callable[[], bool]:
            write()
            return lambda: True

        return begin

    def dcp_async(step: int) -> Callable[[], bool]:
        future: Any = dcp.async_save(tree(), checkpoint_id=folder / "dcp", no_dist=True)
        return lambda: future.done() and bool(future.result())  # raises what went wrong

    def dcp_read(step: int) -> Record:
        back = {name: torch.empty_like(tensor) for name, tensor in tree().items()}
        dcp.load(back, checkpoint_id=folder / "dcp", no_dist=True)
        return back

    (folder / "logs").mkdir()
    own = {
        mode: _nanoray(
            cfg.model_copy(update={"checkpoint_mode": mode}), mesh, gpt, optimizer, folder
        )
        for mode in ("sync", "async")
    }
    arms = {
        RAW: SavingArm(at_once(lambda: _write_raw(tree(), folder)), None),
        SYNC: own["sync"],
        ASYNC: own["async"],
        TORCH: SavingArm(
            at_once(lambda: _torch_save(tree(), folder)),
            lambda step: torch.load(folder / "whole.pt", weights_only=True),
        ),
        DCP: SavingArm(
            at_once(lambda: dcp.save(tree(), checkpoint_id=folder / "dcp", no_dist=True)), dcp_read
        ),
        DCP_ASYNC: SavingArm(dcp_async, dcp_read),
        STAGER: _staged(tree, folder, mesh.device, dcp_read, process=False),
        PROCESS: _staged(tree, folder, mesh.device, dcp_read, process=True),
    }
    return arms, tree


def _staged(
    tree: Callable[[], Record],
    folder: Path,
    device: Any,
    read: Callable[[int], Record],
    process: bool,
) -> SavingArm:
    """Return the arm of a DefaultStager with every option that the device supports.

    Some of its options need CUDA.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    on_gpu = device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=process,
            use_async_staging=True,
            use_non_blocking_copy=on_gpu,
        )
    )
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    begun: list[Any] = []
    stores: list[Any] = []
    variables = ExitStack()

    def begin(step: int) -> Callable[[], bool]:
        # Its process asks the default group for its place, even alone
        if process and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            # Else torch looks for a free port, which somebody may take before the process has
            # started.
            stores.append(open_store("127.0.0.1", 1, 60.0))
            there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[0].port)}
            variables.enter_context(environment({"DCP_USE_PREFIX_STORE": "1", **there}))
        found: Any = dcp.async_save(
            tree(),
            checkpoint_id=folder / "dcp",
            async_stager=stager,
            no_dist=True,
            async_checkpointer_type=kind,
        )
        begun[:] = [found]
        return lambda: found.upload_completion.done() and bool(found.upload_completion.result())

    def close() -> None:
        stager.close()
        if process and dist.is_initialized():
            dist.destroy_process_group()
        variables.close()

    return SavingArm(begin, read, lambda: begun[0].staging_completion.result(), close)


def _flat(model: Record, optimizer: Record) -> Record:
    return {f"model.{name}": t for name, t in model.items()} | {
        f"optimizer.{name}": t for name, t in optimizer.items()
    }


def _nanoray(cfg: Config, mesh: Any, gpt: Any, optimizer: Any, folder: Path) -> SavingArm:
    """Return the arm that saves as the training loop does."""
    from nanoray.checkpoint.files import load
    from nanoray.checkpoint.run_folder import RunSpec, write_attempt
    from nanoray.checkpoint.writer import CheckpointWriter

    spec = RunSpec(
        cfg, DatasetInfo("none", "", folder, "uint16", 0, 0, 0, "", "", {}), folder, started=0.0
    )
    # Both modes are one attempt: a writer commits only in the newest one.
    write_attempt(spec)
    # Makes room for its copy in the first round, which only warms up
    writer = CheckpointWriter(spec, say)

    def begin(step: int) -> Callable[[], bool]:
        writer.save(mesh, saved_state(gpt, optimizer, step), rests=True)

        def done() -> bool:
            if writer.busy:
                return False
            writer.news()
            if writer.committed != step:
                raise CheckpointError(
                    f"the checkpoint of round {step} was not written: is the disk full?"
                )
            return True

        return done

    def read(step: int) -> Record:
        state = load(spec.checkpoints / f"step_{step:08d}")
        return _flat(state.model, state.optimizer)

    def copied() -> None:
        if writer.copying:  # as the loop does
            writer.finish_copy()

    return SavingArm(begin, read, copied)


def saved_state(gpt: Any, optimizer: Any, step: int) -> StateDict:
    """Return what one rank saves after `step`: weights, optimizer state, random generators."""
    import torch

    from nanoray.checkpoint.state.optimizers import optimizer_tensors
    from nanoray.checkpoint.state.state_dict import StateDict
    from nanoray.parallel.pieces import whole_shards

    rng = [{"torch": torch.get_rng_state()}]
    meta = {"step": step, "world_size": 1, "val_loss": None}
    return StateDict(
        gpt.state_dict(), optimizer_tensors(optimizer, whole_shards(gpt)), rng, meta=meta
    )


def _write_raw(tensors: Record, folder: Path) -> None:
    import torch

    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                while chunk:  # a write may be partial
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())


def _torch_save(tensors: Record, folder: Path) -> None:
    import torch

    torch.save(tensors, folder / "whole.tmp")
    _fsync(folder / "whole.tmp")
    os.replace(folder / "whole.tmp", folder / "whole.pt")
    _fsync(folder)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
