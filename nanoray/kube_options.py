"""The key `kube` of a configuration: what a deployment on Kubernetes needs beyond the run itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]


class Kube(BaseModel):
    """What `nanoray kube` needs beyond the run itself: the YAML key `kube`, or flags of its commands.

    Training anywhere else does not look at it. Each attribute's docstring is the help text of its flag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    overlay: str = ""
    """folder of kuberay/overlays (default: cpu, multi-pod or mig-mixed, by --device)"""
    namespace: str = Field(default="nanoray", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    """where everything goes; it is created"""
    image: str = ""
    """image of all pods, with a tag (default: the overlay's)"""
    ranks_per_pod: Positive = 1
    """ranks, and so GPUs, of one worker pod"""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of a worker pod, requested and limited; on CPU at least one per rank"""
    memory_gib: float = Field(default=4.0, gt=0)
    """memory of a worker pod in GiB, /dev/shm included"""
    shm_gib: float = Field(default=1.0, gt=0)
    """/dev/shm of a worker pod in GiB"""
    gpu_resource: str = ""
    """what a rank asks the device plugin for: nvidia.com/gpu, nvidia.com/mig-1g.18gb, ... (default: the overlay's)"""
    storage: str = "hostpath"
    """hostpath (a folder of the one node) | NAME of a StorageClass that offers ReadWriteMany"""
    storage_path: str = Field(default="/var/lib/nanoray", pattern=r"^/")
    """storage hostpath: the folder; uid 1000 must own it"""
    storage_gib: Positive = 100
    """size of the volume in GiB"""
    ttl_s: Natural = 300
    """seconds after its end at which the cluster is deleted; the RayJob's status and the runs stay"""
    retries: Natural = 2
    """new clusters after a lost head, each going on from the newest checkpoint"""
