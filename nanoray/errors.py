"""Everything nanoray raises on purpose. Each message says what happened, the values, and the remedy.

    NanorayError
    ├── ConfigError          the configuration is wrong, or asks for the impossible      exit 2
    ├── DataError            the dataset is missing, damaged, too short, or not text     exit 2
    ├── PlacementError       the machine or the cluster cannot hold the request          exit 3
    ├── RendezvousError      the ranks did not meet, or do not agree with each other     exit 3
    ├── CheckpointError      a checkpoint is damaged, or does not fit this model         exit 4
    ├── TrainingDiverged     a loss that is not finite, or an exhausted loss scale       exit 5
    ├── StateDiverged        the ranks' weights differ, and no majority agrees           exit 1, retried
    ├── StateLost            a share of the state is in no rank's memory any more         exit 1, retried
    └── WorkerFailed         ranks died more often than max_failures allows              exit 1

`exit_code` is what the command line tools return; `retry` says whether a restart from the newest checkpoint can help.
"""


class NanorayError(Exception):
    """The base class: catch this to catch everything that nanoray raises on purpose."""

    exit_code = 1
    retry = False


class ConfigError(NanorayError):
    """The configuration is wrong, or asks for the impossible."""

    exit_code = 2


class DataError(NanorayError):
    """The dataset is missing, damaged, too short, or not text."""

    exit_code = 2


class PlacementError(NanorayError):
    """The machine or the cluster cannot hold what was asked for."""

    exit_code = 3


class RendezvousError(NanorayError):
    """The ranks did not meet, or do not agree with each other."""

    exit_code = 3


class RankDiffers(RendezvousError):
    """This rank has other code, another configuration or other versions than the ranks that it was to join."""


class CheckpointError(NanorayError):
    """A checkpoint is damaged, missing, or does not fit this model."""

    exit_code = 4


class TrainingDiverged(NanorayError):
    """The loss is not finite, or the loss scale is exhausted."""

    exit_code = 5


class StateDiverged(NanorayError):
    """The ranks no longer hold the same weights, and no majority says which are right."""

    retry = True


class StateLost(NanorayError):
    """A share of the run's state was lost with the rank that owned it and the rank that mirrored it."""

    retry = True


class WorkerFailed(NanorayError):
    """Ranks died more often than max_failures allows."""

    exit_code = 1
