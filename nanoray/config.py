"""The configuration of a run: YAML keys, command line flags, help texts and config.json all come
from `Config`.

Later layers win: field defaults, then `--preset`, then `--config FILE`, then flags. Values may
arrive as text (a flag, or `3e-4`, which YAML reads as a string); pydantic converts them to the
declared types or says why it cannot.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nanoray.compression_options import refuse_compression
from nanoray.errors import ConfigError
from nanoray.model_options import did_you_mean as did_you_mean
from nanoray.model_options import lay_over, refuse_contradictions, refuse_parallelism
from nanoray.model_options import read_yaml as read_yaml
from nanoray.model_options import refuse_unknown as refuse_unknown
from nanoray.seq_options import refuse_seq_warmup
from nanoray.stop_options import refuse_stop
from nanoray.watch_options import WatchOptions, refuse_watching

PRESET_DIR = Path(__file__).resolve().parent / "presets"
DEFAULT_PRESET = "shakespeare-cpu"
VOCAB_MULTIPLE = 64  # embeddings are padded to this many rows: matrix products like round sizes

# Overriding a key of these groups changes the recipe, so the preset's expected loss no longer
# applies.
_RECIPE_GROUPS = ("data", "model", "batch", "optim")
_KEEPS_RECIPE = {
    "dataset",
    "data_url",
    "data_dir",
    "micro_batch_size",
    "grad_accum_steps",
    "compile",
}
_KEEPS_RECIPE |= {"attention", "loss_chunk"}  # the same mathematics


def _field(default: Any, group: str, **limits: Any) -> Any:
    return Field(default, json_schema_extra={"group": group}, **limits)


Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]


class Kube(BaseModel):
    """Settings of `nanoray kube`: the YAML key `kube`, or flags of its commands. Training ignores
    them.

    Each attribute's docstring is the help text of its flag.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    overlay: str = ""
    """folder of kuberay/overlays (default: cpu, multi-pod or mig-mixed, by --device)"""
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
    """device resource of a rank: nvidia.com/gpu, nvidia.com/mig-1g.18gb, ... (default: the
    overlay's)"""
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


# Parameters of presigned URLs, such as X-Amz-Signature and sig
_SIGNED_URL = r"(?i)[?&]([^=&]*(?:signature|token|secret|password|credential)[^=&]*|sig|key)="


class Config(WatchOptions):
    """A training run, complete and immutable. Each attribute's docstring is the help text of its
    flag.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    name: str = _field("run", "run", pattern=r"^[A-Za-z0-9._-]+$")
    """name of the run, which ends its folder's name (default: the preset's or file's name)"""
    out_dir: str = _field("runs", "run", min_length=1)
    """parent of the run folders; with several nodes it must be shared storage"""
    resume: str = _field("none", "run", min_length=1)
    """none | auto (the newest run in out_dir with this name and recipe) | PATH of a run folder or of one checkpoint
    """
    seed: int = _field(1337, "run", ge=0, lt=2**63)
    """seed of the initial weights, of the sample order and of dropout"""

    dataset: str = _field("auto", "data", min_length=1)
    """auto (cached, else download, else Python's standard library) | shakespeare | stdlib | PATH of a text file, or of
    a folder with train.bin and val.bin; for a resnet: auto (cached, else download, else generated) | cifar10 |
    cifar10-generated (patterns of 10 classes under noise)"""
    data_url: str = _field("", "data")
    """where `shakespeare` or `cifar10` comes from instead: an http(s):// or file:// URL; its sha256
    must still match"""
    data_dir: str = _field("", "data")
    """cache of downloads and tokens (default: $XDG_CACHE_HOME/nanoray or ~/.cache/nanoray)"""
    tokenizer: Literal["auto", "char", "byte", "gpt2"] = _field("auto", "data")
    """auto (char for Shakespeare, else byte) | char | byte | gpt2 (needs: pip install tiktoken)"""
    val_fraction: float = _field(0.1, "data", gt=0, lt=0.5)
    """share of the text, at its end, kept for validation"""

    model: Literal["gpt", "resnet", "own"] = _field("gpt", "model")
    """gpt (text) | resnet (images: the ResNet for CIFAR-10 of He et al. 2016) | own (a module of your script: see
    nanoray.launch and examples/own_model.py)"""
    resnet_depth: Positive = _field(20, "model")
    """layers of the resnet: 6n + 2, so 8, 14, 20, 32, 44, 50, ..."""
    resnet_width: Positive = _field(1, "model")
    """factor on the resnet's 16, 32 and 64 channels"""
    sync_batchnorm: bool = _field(False, "model")
    """resnet: normalise by the micro batches of all ranks together, not by each rank's own"""
    n_layer: Positive = _field(4, "model")
    """transformer blocks"""
    n_head: Positive = _field(4, "model")
    """attention heads; must divide n_embd"""
    n_embd: Positive = _field(128, "model")
    """width of the residual stream"""
    block_size: Positive = _field(64, "model")
    """context length in tokens; attention memory grows with it, so halve it when a micro batch of 1
    does not fit"""
    dropout: float = _field(0.0, "model", ge=0, lt=1)
    """dropout probability while training"""
    bias: bool = _field(False, "model")
    """biases in linear layers and layer norms, as in GPT-2"""

    micro_batch_size: Natural = _field(0, "batch")
    """sequences per rank per forward pass (0 = follows from the global batch). Out of memory? Halve
    it and leave global_batch_size: accumulation doubles and the result stays the same"""
    grad_accum_steps: Natural = _field(0, "batch")
    """micro steps per optimizer step (0 = follows from the global batch, else 1)"""
    global_batch_size: Natural = _field(0, "batch")
    """sequences per optimizer step over all ranks (0 = micro_batch_size x grad_accum_steps x ranks)
    """

    max_steps: Positive = _field(2000, "optim")
    """optimizer steps of the whole schedule"""
    num_epochs: Natural = _field(0, "optim")
    """in place of max_steps: how often the schedule goes through the training data (0 = max_steps
    counts)"""
    optimizer: Literal["adamw", "sgd", "muon"] = _field("adamw", "optim")
    """adamw (fused) | sgd (plain unless given momentum: parity tests use it because AdamW hides a
    factor on the gradient) | muon (of a gpt: orthogonal updates of the blocks' matrices, adamw for
    all else)"""
    momentum: float = _field(0.0, "optim", ge=0, lt=1)
    """sgd: decay of the sum of past gradients (0 = plain)"""
    nesterov: bool = _field(False, "optim")
    """sgd with momentum: look ahead along the sum (Nesterov)"""
    label_smoothing: float = _field(0.0, "optim", ge=0, lt=1)
    """resnet: share of a label that goes to all classes alike, while training"""
    lr: float = _field(1e-3, "optim", gt=0)
    """peak learning rate"""
    min_lr: float = _field(1e-4, "optim", ge=0)
    """learning rate at the end of the schedule"""
    schedule: Literal["cosine", "wsd", "constant"] = _field("cosine", "optim")
    """cosine | wsd (warm-up, stable, linear decay) | constant, all after a linear warm-up"""
    warmup_steps: Natural = _field(100, "optim")
    """steps of linear warm-up"""
    decay_fraction: float = _field(0.65, "optim", gt=0, le=1)
    """wsd: the last part of the steps, over which the rate falls linearly to min_lr"""
    weight_decay: float = _field(0.1, "optim", ge=0)
    """decay of matrices, convolutions and embeddings: AdamW's decoupled one, or added to the
    gradient by sgd with momentum; plain sgd has none"""
    beta1: float = _field(0.9, "optim", ge=0, lt=1)
    """AdamW: decay of the first moment"""
    beta2: float = _field(0.99, "optim", ge=0, lt=1)
    """AdamW: decay of the second moment"""
    grad_clip: float = _field(1.0, "optim", ge=0)
    """clip gradients to this global norm (0 = off)"""
    scaling: Literal["none", "nanochat"] = _field("none", "optim")
    """nanochat: derive max_steps, global batch, lr and weight decay from the model's size and print
    why; a value given as a flag is kept"""
    tokens_per_param: float = _field(12.0, "optim", gt=0)
    """scaling=nanochat: training tokens per scaling parameter (matrices + lm_head)"""
    compile: bool | Literal["cuda_graphs"] = _field(False, "optim")
    """torch.compile each block, or an own model's layers: slower start, faster steps on GPUs.
    cuda_graphs: also launch the kernels of each at once, for small models on a GPU"""

    workers: Positive | Literal["auto"] = _field("auto", "dist")
    """ranks; auto = every GPU or MIG slice, else 2 on CPU (1 on a single core)"""
    device: Literal["auto", "cuda", "mig", "cpu"] = _field("auto", "dist")
    """cuda (whole GPUs) | mig (slices) | cpu | auto (the first of these that exists)"""
    backend: Literal["auto", "nccl", "gloo"] = _field("auto", "dist")
    """process group: auto = NCCL on distinct GPUs, gloo on CPU and where NCCL does not support a
    shared GPU"""
    placement: Literal["pack", "spread"] = _field("pack", "dist")
    """pack ranks on few nodes, or spread them over many"""
    cpus_per_worker: float = _field(0.0, "dist", ge=0)
    """CPUs reserved per rank (0 = an equal share of the node's on CPU, 1 with a GPU)"""
    dp_mode: Literal["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"] = _field("ddp", "dist")
    """how ranks share the work: ddp (torch's; every rank keeps all gradients and optimizer state) | ddp_by_hand (the
    same, with buckets in plain sight) | zero1 (each rank keeps 1/n of the optimizer state) | zero2 (and of the
    gradients) | fsdp (and of the weights)"""
    mirror: Literal["auto", "off"] = _field("auto", "dist")
    """zero1, zero2 and fsdp, on Ray with gloo: auto (another rank, on another node if there are
    several, keeps a copy of each rank's share and does the same updates, so a lost rank is replaced
    with no step repeated; with AdamW on n ranks 12/n bytes more per parameter, fsdp 16/n, and 4/n
    sent per step) | off (they restart from a checkpoint)"""
    fsdp_reshard: Literal["full", "grad_op"] = _field("full", "dist")
    """fsdp: full (free a block's weights after its forward and gather them again in backward: least
    memory) | grad_op (keep them until backward is done: one all-gather less)"""
    fsdp_gather: Literal["fp32", "bf16"] = _field("fp32", "dist")
    """fsdp: type in which weights are gathered and computed with; bf16 halves these bytes, and
    rounds norms, too"""
    activation_checkpointing: Literal["none", "selective", "block"] = _field("none", "dist")
    """what a forward keeps for backward: none (all of it: fastest) | selective (results of matrix
    products and attention; about a third of the activations less, norms and GELU are computed
    twice) | block (each block's input only: by far the least, and a step computes every block's
    forward twice, up to a third more time); no loss changes by a bit"""
    tp: Positive = _field(1, "dist")
    """tensor parallelism: ranks that share each layer of a gpt, by heads, hidden units and tokens;
    ranks = dp x tp x pp"""
    pp: Positive = _field(1, "dist")
    """pipeline parallelism: ranks that have n_layer/pp blocks of a gpt each, between which micro
    batches pass"""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = _field("1f1b", "dist")
    """pp: gpipe (all forwards, then all backwards) | 1f1b (in turn: the same time, and at most pp micro batches'
    activations) | interleaved (each rank has several chunks of layers: less waiting, more travels) | zero_bubble
    (gradients of weights fill the time in which a stage would wait)"""
    pp_chunks: Natural = _field(0, "dist")
    """pp_schedule interleaved: chunks of layers per rank (0 = 2)"""
    bucket_mb: float = _field(0.0, "dist", ge=0)
    """gradient bucket in MB (0 = 25 on GPU, 8 on CPU); with ddp it fixes the order of sums, so a
    resume keeps it"""
    allreduce: Literal[
        "backend", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "flat"
    ] = _field("backend", "dist")
    """how gradients are summed: backend (NCCL's or gloo's all-reduce) | one written by hand in
    mesh/algorithms.py"""
    comm_trace: str = _field("off", "log")
    """measure each collective: off | every=K (steps K/2 + 1 and K/2 + 2 of every K steps) | always
    """
    timeout_s: float = _field(120.0, "dist", gt=0)
    """seconds after which a waiting collective fails, and the attempt with it"""
    init_timeout_s: float = _field(60.0, "dist", gt=0)
    """seconds within which all ranks must have joined"""
    head_timeout_s: float = _field(15.0, "dist", gt=0)
    """seconds without the cluster's head after which the ranks save and the run ends; raise it only
    where the head's state outlives it (GCS fault tolerance) and the driver is on another node"""
    ray_address: str = _field("auto", "dist", min_length=1)
    """auto (RAY_ADDRESS, else a new local Ray) | local | HOST:PORT"""
    placement_timeout_s: float = _field(4.0, "dist", gt=0)
    """seconds to wait for busy resources, and for nodes that have not joined; above the default
    also for those that an autoscaler may add, or that join later"""

    log_every: Positive = _field(10, "log")
    """steps between metric records; only logging synchronises with the device"""
    eval_every: Natural = _field(250, "log")
    """steps between evaluations on the validation split (0 = never)"""
    eval_samples: Positive = _field(240, "log")
    """validation sequences per evaluation, evenly spaced; the same ones at every world size"""
    checkpoint_every: Natural = _field(250, "log")
    """steps between checkpoints (0 = only at the end and when asked to stop)"""
    checkpoint_mode: Literal["async", "sync"] = _field("async", "log")
    """async (training waits for a copy in host memory, as large as weights and optimizer state; a
    thread of rank 0 writes it) | sync (training waits until the checkpoint is on disk)"""
    keep_checkpoints: Positive = _field(2, "log")
    """newest checkpoints to keep, besides the best one"""
    sample_tokens: Natural = _field(300, "log")
    """tokens of text to generate at the end (0 = none)"""
    tensorboard: bool = _field(True, "log")
    """write TensorBoard events to the run's tb/ folder"""

    max_failures: Natural = _field(3, "fault")
    """failures in a row, with fewer than 10 steps completed between them, before giving up; ranks
    that are left save"""
    recovery: Literal["in_place", "shrink", "restart"] = _field("in_place", "fault")
    """when a rank is lost, on Ray: in_place (only that rank is replaced, its state comes from
    another rank's memory, no step is repeated; a restart with NCCL (but see --abort_nccl), an
    --allreduce written by hand, or where no other rank has the lost part of a divided state: see
    --mirror) | shrink (as in_place, but without a replacement in time fewer ranks, whole replicas
    of tp*pp*ep, keep the same global batch until one comes) | restart (from a checkpoint)"""
    abort_nccl: bool = _field(False, "fault")
    """recovery in place and shrink over NCCL too, where each rank holds the whole state; ranks wait
    for their device in each step, and this has not been run on a GPU yet"""
    replace_timeout: float = _field(60.0, "fault", ge=0)
    """seconds to wait for a lost rank's replacement; then in_place saves and restarts, and shrink
    continues with fewer ranks"""
    spares: Natural | Literal["auto"] = _field("auto", "fault")
    """idle processes, with everything imported and no device taken, that replace a lost rank at
    once (auto = one, started after half a minute, where a lost rank is replaced in place)"""
    hang_timeout: float = _field(60.0, "fault", ge=0)
    """seconds without progress on any rank after which, on Ray, the rank that is behind is named,
    ended and replaced (0 = off). Keep it below timeout_s: after that the collectives fail first,
    and no rank is named"""
    on_nan: Literal["stop", "skip", "rollback"] = _field("stop", "fault")
    """when a loss or gradient is not finite (it never reaches the weights): stop (exit 5, naming rank, layer and
    samples) | skip (leave that update out; 11 in a row stop) | rollback (load the newest checkpoint and continue with
    the data after the bad step; the 4th rollback to the same checkpoint stops)"""
    hash_every: Natural = _field(250, "fault")
    """steps between comparisons of all ranks' weights and optimizer state, also made before each
    checkpoint (0 = never, for devices that round differently): a rank that differs gets the
    majority's state"""
    faults: str = _field("", "fault")
    """break something on purpose: KIND@rank=R,step=S[,phase=P][;...], KIND kill | stop | exit | raise | hang | slow |
    oom | disk-full | nan | bitflip | gradflip; in YAML also a list of such texts, or of mappings"""

    expected_val_loss: dict[str, float] = Field(
        {}, json_schema_extra={"group": "log", "flag": False}
    )
    """per dataset: the validation loss that the complete recipe should reach or beat"""
    kube: Kube = Field(Kube(), json_schema_extra={"group": "run", "flag": False})
    """settings of `nanoray kube`; training ignores them"""

    @field_validator("faults", mode="before")
    @classmethod
    def _plan_as_text(cls, plan: Any) -> Any:
        """Write a YAML list of faults as the text of the flag."""
        if not isinstance(plan, list):
            return plan
        texts = []
        for fault in plan:
            if isinstance(fault, dict):
                values = ",".join(f"{key}={value}" for key, value in fault.items() if key != "kind")
                fault = f"{fault.get('kind', '')}@{values}"
            texts.append(str(fault))
        return ";".join(texts)

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Config:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}; "
                f"try n_embd {self.n_embd // self.n_head * self.n_head or self.n_head}"
            )
        if self.spares not in ("auto", 0) and self.recovery == "restart":
            raise ValueError(
                f"spares = {self.spares} would be ignored: recovery = restart starts all ranks "
                "anew; "
                "use recovery in_place, or drop spares"
            )
        refuse_contradictions(
            self, {key: field.default for key, field in type(self).model_fields.items()}
        )
        # Known with the dataset; then these checks come again
        steps = 10**18 if self.num_epochs else self.max_steps
        refuse_stop(self, steps)
        refuse_seq_warmup(self, steps)
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr = {self.min_lr} is above lr = {self.lr}; lower min_lr or raise lr"
            )
        if not re.fullmatch(r"off|always|every=[1-9]\d*", self.comm_trace):
            raise ValueError(
                f"comm_trace = {self.comm_trace!r} is none of off, always, every=K; try every=50"
            )
        last = min(steps, self.stop_at or steps)
        if self.trace_every // 2 >= last:
            raise ValueError(
                f"comm_trace = {self.comm_trace} would trace nothing: its first step is "
                f"{self.trace_every // 2 + 1} "
                f"and the run ends at step {last}; use a smaller K, or always"
            )
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError(
                "backend = nccl needs GPUs, but device = cpu; use backend gloo or auto"
            )
        refuse_parallelism(self)
        refuse_compression(self)
        refuse_watching(self, steps)
        if self.data_url and self.dataset not in ("auto", "shakespeare", "cifar10"):
            raise ValueError(
                f"data_url would be ignored: dataset = {self.dataset} is not downloaded; "
                "drop data_url, or use dataset shakespeare or cifar10"
            )
        if re.search(r"://[^/]*@", self.data_url):
            raise ValueError(
                "data_url holds a password, which config.json and logs would repeat; host the file "
                "where none is needed"
            )
        if signed := re.search(_SIGNED_URL, self.data_url):
            raise ValueError(
                f"data_url carries a secret ({signed[1]}=...), which config.json and logs would "
                "repeat; download the "
                "file and name it with dataset PATH"
            )
        if not (self.micro_batch_size or self.global_batch_size):
            raise ValueError(
                "no batch size: give micro_batch_size (per rank) or global_batch_size (all ranks)"
            )
        return self

    @property
    def sharded(self) -> bool:
        """Whether no rank has the whole state: each keeps the optimizer state of its own shard."""
        return self.tp * self.pp * self.ep > 1 or self.dp_mode in ("zero1", "zero2", "fsdp")

    def mirrors(self, backend: str = "gloo") -> bool:
        """Whether each rank's share of a sharded state is kept by another rank, too, where there
        are several ranks.
        """
        kept = self.mirror == "auto" and self.dp_mode in ("zero1", "zero2", "fsdp")
        return kept and self.recovery != "restart" and backend == "gloo" and not self.pure

    def replicated(self, ranks: int) -> bool:
        """Whether another replica has each rank's part of a state that tp, pp and ep divide."""
        kept = self.recovery != "restart" and self.dp_mode in ("ddp", "ddp_by_hand")
        return kept and 1 < self.tp * self.pp * self.ep <= ranks / 2

    @property
    def chunks(self) -> int:
        """The chunks of layers that each stage of a pipeline has."""
        return (self.pp_chunks or 2) if self.pp_schedule == "interleaved" else 1

    @property
    def trace_every(self) -> int:
        """K of comm_trace every=K; 1 for always, 0 for off. Traced are steps K/2 + 1 and K/2 + 2 of
        every K.
        """
        if self.comm_trace in ("off", "always"):
            return int(self.comm_trace == "always")
        return int(self.comm_trace.removeprefix("every="))

    def to_json(self) -> str:
        """The configuration as JSON text; `--config` reads it back."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def recipe_of(config: Config) -> dict[str, Any]:
    """Return the keys and values that make two runs the same experiment: not its length, logging,
    devices, ranks.
    """
    keys = {
        key for key in Config.model_fields if field_group(key) in _RECIPE_GROUPS
    } - _KEEPS_RECIPE
    keys = keys - {"max_steps", "num_epochs", "precision"} | {"name", "seed"}
    return {key: value for key, value in config.model_dump().items() if key in keys}


class Batch(NamedTuple):
    """The batch arithmetic of a run: global = micro x accum x dp sequences."""

    micro: int
    accum: int
    dp: int

    @property
    def global_size(self) -> int:
        return self.micro * self.accum * self.dp


def resolve_batch(config: Config, dp: int) -> Batch:
    """Split the global batch over `dp` ranks, or multiply the per-rank batch up to it.

    Raises ConfigError when the sizes contradict each other or do not divide.
    """
    micro, accum, total = config.micro_batch_size, config.grad_accum_steps, config.global_batch_size
    if not total:
        return Batch(micro, accum or 1, dp)
    if micro and accum and micro * accum * dp != total:
        raise ConfigError(
            f"micro_batch_size*grad_accum_steps*ranks = {micro}*{accum}*{dp} = "
            f"{micro * accum * dp}, but "
            f"global_batch_size = {total}; drop one of the three, or set global_batch_size "
            f"{micro * accum * dp}"
        )
    share = (micro or accum or 1) * dp
    if total % share:
        unit = (
            f"micro_batch_size*ranks = {micro}*{dp}"
            if micro
            else f"grad_accum_steps*ranks = {accum or 1}*{dp}"
        )
        near = max(share, round(total / share) * share)
        raise ConfigError(
            f"global_batch_size = {total} is not a multiple of {unit} = {share}; "
            f"try global_batch_size {near}, or another number of workers"
        )
    return Batch(micro, total // share, dp) if micro else Batch(total // share, accum or 1, dp)


def batch_for(config: Config, full: int, ranks: int) -> Batch | None:
    """Split the global batch of a run of `full` ranks over fewer, with no larger micro batches;
    None if impossible.
    """
    batch = resolve_batch(config, full)
    if ranks == full:
        return batch
    share, rest = divmod(batch.global_size, ranks)
    accums = range(batch.accum, share + 1, config.pp if config.pp_schedule == "interleaved" else 1)
    accum = next((n for n in accums if share % n == 0 and share // n <= batch.micro), 0)
    return Batch(share // accum, accum, ranks) if accum and not rest else None


def load_config(
    file: str | None = None, preset: str | None = None, overrides: dict[str, Any] | None = None
) -> Config:
    """Merge preset, file and overrides into a Config. Without file and preset: the default preset."""
    overrides = overrides or {}
    merged: dict[str, Any] = {}
    if preset or not file:
        merged |= {"name": preset or DEFAULT_PRESET} | _read_preset(preset or DEFAULT_PRESET)
    if file:
        merged = lay_over(merged, {"name": Path(file).stem} | read_yaml(Path(file)), file)
    if not merged.keys() <= Config.model_fields.keys():
        refuse_unknown(
            next(k for k in merged if k not in Config.model_fields),
            list(Config.model_fields),
            "key",
        )
    # A per-rank batch from the flags replaces a global one from the file; a global one replaces
    # accumulation.
    if {
        "micro_batch_size",
        "grad_accum_steps",
    } <= overrides.keys() and "global_batch_size" not in overrides:
        merged.pop("global_batch_size", None)
        merged.pop("expected_val_loss", None)
    elif "global_batch_size" in overrides:
        merged.pop("grad_accum_steps", None)
    if any(field_group(k) in _RECIPE_GROUPS and k not in _KEEPS_RECIPE for k in overrides):
        merged.pop("expected_val_loss", None)
    return make_config(lay_over(merged, overrides, "the flags"))


def make_config(values: dict[str, Any]) -> Config:
    """Validate `values` into a Config; a pydantic error becomes a one-line ConfigError that names
    key and value.
    """
    unknown = [k for k in values if k not in Config.model_fields]
    if unknown:
        refuse_unknown(unknown[0], list(Config.model_fields), "key")
    try:
        return Config(**values)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            message = item["msg"].removeprefix("Value error, ")
            key = str(item["loc"][0]) if item["loc"] else ""
            value = values.get(key)
            if key == "kube" and len(item["loc"]) > 1:
                key, value = f"kube.{item['loc'][1]}", item["input"]
            problems.append(f"{key} = {value!r}: {message}" if key else message)
        raise ConfigError("; ".join(dict.fromkeys(problems))) from None


def _read_preset(preset: str) -> dict[str, Any]:
    path = PRESET_DIR / f"{preset}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in PRESET_DIR.glob("*.yaml"))
        refuse_unknown(preset, names, f"preset (in {PRESET_DIR})")
    return read_yaml(path)


def field_extra(key: str) -> dict[str, Any]:
    extra = Config.model_fields[key].json_schema_extra
    return extra if isinstance(extra, dict) else {}


def field_group(key: str) -> str | None:
    return field_extra(key).get("group") if key in Config.model_fields else None
