"""Everything nanoray raises on purpose. Each message says what happened, the values, and the
remedy.

    NanorayError
    ├── ConfigError          the configuration is wrong, or asks for the impossible      exit 2
    ├── DataError            the dataset is missing, damaged, too short, or not text     exit 2
    ├── DataFailed           a script's data fail in the middle of a run; its steps are saved    exit 1
    ├── PlacementError       the machine or the cluster cannot hold the request          exit 3
    ├── RendezvousError      the ranks did not meet, or do not agree with each other     exit 3
    │   ├── RankDiffers      this rank has other code, settings or versions              exit 3
    │   └── GroupNotFormed   the ranks met, but could not connect to each other          exit 3
    ├── CheckpointError      a checkpoint is damaged, or does not fit this model         exit 4
    ├── TrainingDiverged     a loss that is not finite, or an exhausted loss scale       exit 5
    ├── StateDiverged        the ranks' weights differ, and no majority agrees           exit 1, retried
    ├── WrongGradient        a rank computes a wrong gradient, in a step done twice     exit 1
    ├── StateLost            a share of the state is in no rank's memory any more         exit 1, retried
    ├── OutOfMemory          a step ran out of memory where ranks cannot meet again      exit 1, retried
    ├── MemoryExhausted      a later step does not fit, however small a micro batch is   exit 1
    └── WorkerFailed         ranks died more often than max_failures allows              exit 1

`exit_code` is what the command line tools return; `retry` says whether a restart from the newest
checkpoint can help; `refuses` says that the message is complete: no log of a rank has more.
`python -m nanoray.errors` prints docs/errors.md.
"""


class NanorayError(Exception):
    """The base class: catch this to catch everything that nanoray raises on purpose."""

    exit_code = 1
    retry = False
    refuses = False


class ConfigError(NanorayError):
    """The configuration is wrong, or asks for the impossible."""

    exit_code = 2
    refuses = True


class DataError(NanorayError):
    """The dataset is missing, damaged, too short, or not text."""

    exit_code = 2
    refuses = True


class DataFailed(NanorayError):
    """A script's data raise an error in the middle of a run, whose steps are saved."""


class PlacementError(NanorayError):
    """The machine or the cluster cannot hold what was asked for."""

    exit_code = 3
    refuses = True


class RendezvousError(NanorayError):
    """The ranks did not meet, or do not agree with each other."""

    exit_code = 3


class RankDiffers(RendezvousError):
    """This rank has other code, another configuration or other versions than the other ranks."""

    refuses = True


class GroupNotFormed(RendezvousError):
    """The ranks met, but could not connect to each other."""


class CheckpointError(NanorayError):
    """A checkpoint is damaged, missing, or does not fit this model."""

    exit_code = 4
    refuses = True


class TrainingDiverged(NanorayError):
    """The loss is not finite, or the loss scale is exhausted."""

    exit_code = 5


class StateDiverged(NanorayError):
    """The ranks no longer hold the same weights, and no majority says which are right."""

    retry = True


class WrongGradient(NanorayError):
    """Ranks compute different gradients from equal weights and samples, in a step done twice."""


class StateLost(NanorayError):
    """A share of the run's state was lost with its owner and each rank that mirrored or held it."""

    retry = True


class OutOfMemory(NanorayError):
    """A step ran out of memory where ranks cannot form another group; a restart accumulates more."""

    retry = True


class MemoryExhausted(NanorayError):
    """A step that is not the first runs out of memory, and no smaller micro batch helps."""


class WorkerFailed(NanorayError):
    """Ranks died more often than max_failures allows."""

    exit_code = 1


REMEDIES: dict[type[NanorayError], str] = {
    ConfigError: "change the key that the message names; `--dry_run` shows the plan without starting anything",
    DataError: "give another `--dataset`, or mend what the message names",
    DataFailed: "mend what the script's traceback shows, then `--resume RUN`",
    PlacementError: "lower `--workers`, or add nodes; `nanoray check` shows what would run where",
    RendezvousError: "same code, versions and configuration on all ranks; `logs/rankN.log` of the absent rank",
    RankDiffers: "update that node, or let the run go on without it (`--recovery shrink`)",
    GroupNotFormed: "`logs/rankN.log` of a rank that was lost meanwhile; `*_SOCKET_IFNAME` for another interface",
    CheckpointError: "`nanoray checkpoint verify RUN` names the damaged ones; `--resume` an older one",
    TrainingDiverged: "lower `--lr`; `--on_nan rollback` leaves the batch out; `--precision bf16` or `fp32`",
    StateDiverged: "repeated on one rank: a faulty device, whose node should leave the cluster",
    WrongGradient: "take the faulty device out of the cluster, and resume from a checkpoint that is old enough",
    StateLost: "the run restarts from the newest checkpoint; a lower `--checkpoint_every` loses less",
    OutOfMemory: "`--resume RUN`: it begins with a smaller micro batch, as a restart does by itself",
    MemoryExhausted: "change what the message names, then `--resume RUN`",
    WorkerFailed: "`nanoray faults RUN` lists the causes; then `--resume RUN`, and `--max_failures` to allow more",
}
EXIT_CODES = {
    0: "the run has finished",
    1: "ranks, memory or a script's data failed, a file cannot be used, or a defect of nanoray (with a traceback)",
    2: "the configuration or the dataset is wrong: nothing was started",
    3: "the machine or cluster cannot hold the ranks, or they did not meet",
    4: "a checkpoint is damaged, missing, or of another model",
    5: "training diverged: the last checkpoint is from before",
    129: "stopped by SIGHUP, with a checkpoint",
    130: "stopped by Ctrl-C, with a checkpoint; by a second Ctrl-C, or KeyboardInterrupt in a script, at once",
    143: "stopped by SIGTERM, `ray job stop`, a lost head or a frozen driver, with a checkpoint",
}


def to_markdown() -> str:
    """Return docs/errors.md."""
    lines = [
        "# Errors and exit codes",
        "",
        "Generated by `make docs`. A command prints an error as one line: what is wrong,",
        "the values, and what to change. In Python each is a subclass of `nanoray.errors.NanorayError`.",
        "",
        "| error | exit code | what it says | what to do |",
        "| --- | --- | --- | --- |",
    ]
    for kind, remedy in REMEDIES.items():
        retried = ", retried" if kind.retry else ""
        meaning = " ".join((kind.__doc__ or "").split())
        lines.append(f"| `{kind.__name__}` | {kind.exit_code}{retried} | {meaning} | {remedy} |")

    lines += ["", "## Exit codes", "", "| exit code | after |", "| ---: | --- |"]
    for code, meaning in EXIT_CODES.items():
        lines.append(f"| {code} | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(to_markdown())
