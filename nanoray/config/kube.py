"""Settings of `nanoray kube`, nested under the YAML key `kube`. Training ignores them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from nanoray.config.fields import Natural, Positive


class Kube(BaseModel):
    """Settings of `nanoray kube`: the YAML key `kube`, or flags of its commands. Training ignores
    them.

    Each attribute's docstring is the help text of its flag.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    overlay: str = ""
    """folder of kuberay/overlays (default: by --device cpu, multi-pod or mig-mixed); gpu-dra and
    mig-dra claim GPUs of NVIDIA's DRA driver"""
    namespace: str = Field(
        default="nanoray", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63
    )
    """namespace of all objects; created if it does not exist"""
    image: str = ""
    """image of all pods, with a tag (default: the overlay's)"""
    ranks_per_pod: Natural = 0
    """ranks, and so GPUs, of one worker pod (0 = the overlay's)"""
    cpus: float = Field(default=0.0, ge=0)
    """CPUs of a worker pod, requested and limited (0 = the overlay's)"""
    memory_gib: float = Field(default=0.0, ge=0)
    """memory of a worker pod in GiB, /dev/shm included (0 = the overlay's)"""
    shm_gib: float = Field(default=0.0, ge=0)
    """/dev/shm of a worker pod in GiB (0 = the overlay's)"""
    gpu_resource: str = ""
    """resource of a rank: nvidia.com/gpu, nvidia.com/mig-1g.18gb, ... (default: the overlay's)"""
    storage: str = "hostpath"
    """hostpath (a folder of the one node) | NAME of a StorageClass that offers ReadWriteMany"""
    storage_path: str = Field(default="/var/lib/nanoray", pattern=r"^/")
    """storage hostpath: the folder; uid 1000 must own it"""
    storage_gib: Positive = 100
    """size of the volume in GiB"""
    ttl_s: Natural = 300
    """seconds between the job's end and the deletion of its cluster; the RayJob's status and the
    runs stay"""
    retries: Natural = 2
    """new clusters after a lost head; each one resumes from the newest checkpoint"""
