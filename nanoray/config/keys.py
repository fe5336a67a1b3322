"""All keys of a run side by side, and the values that follow from keys of several groups."""

from __future__ import annotations

from pydantic import Field

from nanoray.config.batch import BatchKeys
from nanoray.config.data import DataKeys
from nanoray.config.fault import FaultKeys
from nanoray.config.fields import Group
from nanoray.config.kube import Kube
from nanoray.config.log import LogKeys
from nanoray.config.mesh import SHARDS_STATE, MeshKeys
from nanoray.config.model import ModelKeys
from nanoray.config.optim import OptimKeys
from nanoray.config.run import RunKeys

# In the order of --help, of docs/flags.md and of config.json
GROUPS: tuple[type[Group], ...] = (
    RunKeys,
    DataKeys,
    ModelKeys,
    BatchKeys,
    OptimKeys,
    MeshKeys,
    LogKeys,
    FaultKeys,
)

# The steps of a schedule in epochs, which are counted only when the data set is open
UNKNOWN_STEPS = 10**18


# pydantic collects the fields of base classes from the last one to the first, so the bases stand
# in the reverse order of GROUPS.
class Keys(FaultKeys, LogKeys, MeshKeys, OptimKeys, BatchKeys, ModelKeys, DataKeys, RunKeys):
    """The keys of all groups. No group inherits another one; schema.py adds the checks."""

    kube: Kube = Field(Kube(), json_schema_extra={"group": "run", "flag": False})
    """settings of `nanoray kube`; training ignores them"""

    @property
    def scheduled_steps(self) -> int:
        """The steps of the schedule; UNKNOWN_STEPS while num_epochs is not counted in steps yet."""
        if self.num_epochs:
            return UNKNOWN_STEPS
        return self.max_steps

    @property
    def last_step(self) -> int:
        """The last step that this command does."""
        return min(self.scheduled_steps, self.stop_at or self.scheduled_steps)

    def mirrors(self, backend: str = "gloo") -> bool:
        """Return whether another rank keeps a copy of each rank's share of a sharded state.

        True also where there is only one rank, which mirrors nothing.
        """
        if self.mirror == "off" or self.dp_mode not in SHARDS_STATE or self.replicas > 1:
            return False
        return self.recovery != "restart" and backend == "gloo" and not self.pure

    def replicated(self, ranks: int) -> bool:
        """Return whether another replica has each rank's part of a state divided by tp, pp, ep.

        With sharded state: whether another group of data ranks has each rank's share.
        """
        if self.recovery == "restart":
            return False
        if self.dp_mode in SHARDS_STATE:
            return self.replicas > 1
        return 1 < self.model_parts <= ranks / 2
