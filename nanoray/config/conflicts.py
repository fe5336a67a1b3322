"""What does not go with what: one table of rows, one function that walks it.

A row is data: what is asked, what excludes it, why, and what to change. conflict_rows.py says how to write
one; a new feature adds rows, not functions. Rules of arithmetic, such as a size that must divide
another one, are in the same table with a function each (conflict_sizes.py).

A row can be decided as soon as the values that it reads are known: most rows by the keys alone,
some by the number of ranks (the key `workers` may be auto) or by the device (`device` may be auto).
Callers that have these values pass them to `first`; the message is the same early and late.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import nanoray.config.conflict_sizes as sizes
from nanoray.config.conflict_rows import Row, Rule, ignored, refused, rule
from nanoray.config.data import IMAGES
from nanoray.config.keys import Keys
from nanoray.config.mesh import BY_HAND, CUTS_MODEL, SHARDS_STATE, WHOLE_MODELS
from nanoray.errors import ConfigError

# ---- what several rows say -----------------------------------------------------------------------

PURE = ("bf16_pure", "fp16_pure")  # values of precision whose weights have 16 bits
EXPERT_KEYS = (
    "experts_per_token",
    "expert_hidden",
    "shared_experts",
    "balance_loss",
    "z_loss",
    "ep",
)
# A script brings the layers of its own model, so only the keys of its text are left
GPT_KEYS = (
    "dropout",
    "bias",
    "activation_checkpointing",
    "experts",
    *EXPERT_KEYS,
    "positions",
    "init_from",
    "gelu",
    "attention",
    "loss_chunk",
)
NEED_RANKS = ("comm_trace", "allreduce", "grad_compress", "audit_every")

_NO_GPT = "model other than gpt"
_PURE = f"precision {' or '.join(PURE)}"
_CUT = [f"{axis} above 1" for axis in CUTS_MODEL]
_NOT_WHOLE = f"dp_mode other than {' and '.join(WHOLE_MODELS)}"
_HAS_EXPERTS = "experts above 0"
_COMPILED = "compile other than False"
_IMAGES = " or ".join(IMAGES)
_NO_OPTION = "has no such option"
_NO_GRADIENT = "so no other rank can compute its gradient alone"
_NO_ADAM = "optimizer other than adamw and muon"


def _graphs(other: str, why: str) -> list[Row]:
    """Rows of CUDA graphs, which repeat recorded kernels at fixed addresses and nothing else."""
    why = f"{why}, and a graph repeats what it has recorded"
    return refused("compile cuda_graphs", other, why, "use compile true")


def _fp8(other: str, what: str, also: str = "") -> list[Row]:
    """Rows of fp8, which replaces linear layers by ones of its own."""
    why = f"8-bit products are not written for {what}"
    return refused("precision fp8", other, why, f"drop {also or '{other}'}, or use precision bf16")


# ---- the table -----------------------------------------------------------------------------------

# The first row that a configuration meets is its error, so what is most likely a mistake in typing
# stands above what needs thought.
# fmt: off
TABLE: tuple[Row, ...] = tuple(chain(
    # Model
    ignored("tokenizer", "model other than gpt and own", _NO_OPTION, "drop it, or use model gpt"),
    ignored(GPT_KEYS, _NO_GPT, _NO_OPTION, "drop it, or use model gpt"),
    ignored(("resnet_depth", "label_smoothing"), "model other than resnet",
            _NO_OPTION, "drop it, or use model resnet"),
    ignored("sync_batchnorm", "model other than resnet and own",
            _NO_OPTION, "drop it, or use model resnet"),
    ignored(EXPERT_KEYS, "experts 0", "", "give experts 8, or drop {asked}"),

    # Expert parallelism
    rule("ep experts", "ep must divide experts", sizes.ep_divides),
    refused("ep above 1", f"dp_mode other than {' and '.join(BY_HAND)}",
            "it cannot sum the gradients of experts over other ranks than the rest",
            "use dp_mode ddp_by_hand, zero1 or zero2"),

    # Data
    refused(f"dataset other than auto and {' and '.join(IMAGES)}", "model resnet",
            "the dataset is text, and a resnet learns from images",
            f"use dataset auto, {_IMAGES}"),
    refused(f"dataset {_IMAGES}", "model gpt",
            "the dataset has images, and a gpt learns from text", "use model resnet"),

    # Kernels. The loss in chunks needs the logits of the whole vocabulary, and computes gradients
    # itself
    ignored("loss_chunk above 0", "tp above 1",
            "cuts the logits by tokens of the vocabulary", "drop one of the two"),
    refused("loss_chunk above 0", f"{_PURE} or fp16",
            "its gradients are computed before the loss is scaled, and 16 bits would lose the small "
            "ones", "use precision bf16, or drop loss_chunk"),
    refused("attention cudnn", "device cpu", "cuDNN's kernel needs a GPU", "use attention flash"),
    refused("attention cudnn", "precision fp32 or tf32",
            "cuDNN's kernel computes in 16 bits", "use attention flash"),
    _graphs("device cpu", "a CPU has no kernels to launch"),
    _graphs("dp_mode other than ddp", "it keeps gradients, or weights, in buckets of its own"),
    _graphs("tp above 1", "its ranks exchange activations within a layer"),
    _graphs("cp above 1", "its ranks exchange keys and values within a layer"),
    _graphs("pp above 1", "several micro batches are in flight at once"),
    _graphs(_HAS_EXPERTS, "how many tokens an expert gets is known in the step only"),
    _graphs("sync_batchnorm True", "its ranks exchange statistics within a layer"),
    _graphs("audit_every above 0", "gradients of another rank's micro batch need other addresses"),
    # The backward of a fused kernel adds up in the order in which its blocks become ready, so the
    # last bits of healthy gradients differ from one time to the next
    refused("audit_every above 0", "attention flash or cudnn",
            "on a GPU the last bits of its gradients differ each time, so healthy ranks would look "
            "wrong", "use attention plain, or audit_every 0", also="device cuda or mig"),

    # `nanoray tune` measures it, on the model that the configuration describes
    refused("micro_batch_size auto", "grad_accum_steps above 0",
            "accumulation follows from the micro batch that is found",
            "drop grad_accum_steps, or give micro_batch_size a number"),
    refused("micro_batch_size auto", "model own",
            "only the script can make its model",
            "give the number that nanoray.tune(main, config) finds"),
    refused("micro_batch_size auto", "model resnet",
            "its batch norms take mean and variance of a micro batch, so the result depends on it",
            "give micro_batch_size a number"),

    # Optimizer. Muon orthogonalises each matrix of the blocks, so a rank must have it whole
    ignored("muon_lr", "optimizer other than muon", "", "use optimizer muon, or drop it"),
    refused("optimizer muon", _NO_GPT,
            "it is for the matrices of a gpt", "use optimizer adamw or sgd"),
    refused("optimizer muon", _HAS_EXPERTS,
            "it is for models without experts", "use optimizer adamw"),
    refused("optimizer muon", ("tp above 1", "pp above 1"),
            "it needs whole matrices", "use optimizer adamw, or drop {other}"),
    refused("optimizer muon", _NOT_WHOLE,
            "it needs whole matrices", "use dp_mode ddp or ddp_by_hand, or optimizer adamw"),
    ignored("momentum above 0", "optimizer other than sgd",
            "has its own", "use optimizer sgd, or drop it"),
    ignored("nesterov", "optimizer other than sgd", "", "use optimizer sgd, or drop nesterov"),
    ignored("nesterov", "momentum 0", "", "give momentum 0.9, or drop nesterov"),

    # Ends of a run
    rule("stop_at max_steps num_epochs", "stop_at at most max_steps", sizes.stop_is_reached),
    ignored("target_loss above 0", "eval_every 0",
            "evaluates nothing", "raise eval_every, or drop target_loss"),

    # Short sequences
    rule("seq_warmup_steps max_steps num_epochs",
         "seq_warmup_steps at most max_steps", sizes.warmup_is_reached),
    rule("seq_warmup_steps seq_warmup_from block_size",
         "seq_warmup_steps: block_size must be 16, 32, 64, ...", sizes.lengths_double),
    refused("seq_warmup_steps above 0", _NO_GPT,
            "only a gpt has sequences that can be cut", "drop one of the two"),
    refused("seq_warmup_steps above 0", ("tp above 1", "pp above 1"),
            "its ranks pass each other sequences of block_size tokens", "drop one of the two"),
    refused("seq_warmup_steps above 0", _COMPILED,
            "it would compile for each length, and a resumed run for other ones",
            "drop one of the two"),

    # Process group and how gradients are summed. Hand-written all-reduces replace the one in
    # torch's DDP, which sums over all ranks
    rule("comm_trace max_steps num_epochs stop_at",
         "comm_trace every=K: the run must reach step K/2 + 1", sizes.trace_is_reached),
    refused("backend nccl", "device cpu", "NCCL needs GPUs", "use backend gloo or auto"),
    refused("allreduce", _CUT, "it sums over all ranks", "drop one of the two"),
    ignored("allreduce", "dp_mode other than ddp",
            "sums by its own exchange", "drop one of the two"),
    ignored(("fsdp_reshard grad_op", "fsdp_gather bf16"), "dp_mode other than fsdp",
            "", "use dp_mode fsdp, or {asked} {default}"),
    refused("fsdp_gather bf16", ("precision fp16", "model resnet"),
            "its layers cannot take weights of bf16", "use fsdp_gather fp32"),

    # Context parallelism
    refused("cp above 1", _NO_GPT, "it cuts the sequences of a gpt", "drop cp"),
    refused("cp above 1", _HAS_EXPERTS,
            "the balance of experts is that of a whole sequence", "drop one of the two"),
    rule("cp block_size tp sequence_parallel seq_warmup_steps seq_warmup_from",
         "cp: 2 * cp must divide block_size", sizes.cp_divides_sequences),
    refused("attention cudnn", "cp above 1",
            "cuDNN's kernel is not written for parts of sequences", "use attention flash"),
    refused("cp above 1", "dropout above 0",
            "each rank would have to draw the masks of whole sequences",
            "use dropout 0, or drop cp"),

    # Hybrid sharding
    ignored("replicas above 1", f"dp_mode other than {' and '.join(SHARDS_STATE)}",
            "shards nothing: every rank is a replica already",
            "use dp_mode zero1, zero2 or fsdp, or drop replicas"),
    refused("ep above 1", "replicas above 1",
            "each divides the data ranks in a way of its own", "drop one of the two"),

    # Tensor parallelism
    refused("tp above 1", _NO_GPT, "it cuts the layers of a gpt", "drop tp"),
    ignored("sequence_parallel True", "tp 1",
            "shares no sequences", "use tp 2, or drop sequence_parallel"),
    rule("tp n_head n_embd experts expert_hidden",
         "tp must divide n_head, 4 * n_embd and expert_hidden", sizes.tp_divides),
    rule("sequence_parallel tp block_size",
         "sequence_parallel: tp must divide block_size", sizes.tp_divides_sequences),

    # Pipelines. zero_bubble computes gradients of inputs first and those of weights later, in idle
    # time
    ignored("pp_schedule", "pp 1", "is no pipeline", "raise pp, or drop it"),
    ignored("pp_chunks", "pp_schedule other than interleaved",
            "", "use pp_schedule interleaved, or pp_chunks 0"),
    refused("pp_chunks 1", "pp_schedule interleaved",
            "with one chunk it is the schedule 1f1b", "use pp_schedule 1f1b, or at least 2 chunks"),
    refused("pp above 1", _NO_GPT, "it splits the blocks of a gpt", "drop pp"),
    refused("dp_mode fsdp", "pp above 1",
            "each pass of a micro batch would gather a stage's weights anew",
            "use dp_mode zero2, which shards all but the weights, or drop pp"),
    refused("pp_schedule zero_bubble", _COMPILED,
            "a compiled block computes both halves of its backward at once",
            "use pp_schedule 1f1b, or drop compile"),
    refused("pp_schedule zero_bubble", "activation_checkpointing",
            "each half of a backward would compute the forward again",
            "use pp_schedule 1f1b, or drop activation_checkpointing"),
    refused("pp_schedule zero_bubble", "dp_mode zero2",
            "it sums after each backward, and there are two",
            "use pp_schedule 1f1b, or drop dp_mode zero2"),
    rule("pp pp_chunks n_layer", "pp * chunks must divide n_layer", sizes.stages_divide),
    rule("pp_schedule pp grad_accum_steps global_batch_size",
         "pp_schedule interleaved: pp must divide grad_accum_steps", sizes.groups_divide),

    # Number formats. 16-bit weights have an optimizer of their own, which rounds each update
    refused("precision tf32", "device cpu", "tf32 is a format of GPUs", "use precision fp32"),
    refused("precision fp8", _NO_GPT,
            "it is for the linear layers of a gpt", "use precision bf16"),
    refused("precision fp8", _HAS_EXPERTS, "it is for a gpt without experts", "use precision bf16"),
    _fp8("tp above 1", "parts of layers"),
    _fp8("pp above 1", "stages"),
    _fp8(_COMPILED, "compiled blocks"),
    _fp8("activation_checkpointing", "a second forward"),
    _fp8("dp_mode fsdp", "gathered weights", "dp_mode fsdp"),
    ignored("fp8_scaling row", "precision other than fp8", "", "use precision fp8, or drop it"),
    ignored("master_weights fp32", f"precision other than {' and '.join(PURE)}",
            "", "use precision bf16_pure, or drop it"),
    ignored("rounding stochastic", "precision other than bf16_pure", "", "use precision bf16_pure, or drop it"),
    refused("rounding stochastic", "master_weights fp32",
            "it is for weights without a float32 copy", "use one of the two"),
    refused(_PURE, _NO_GPT,
            "it stores the weights of a gpt in 16 bits", "use precision bf16 or fp16"),
    refused(_PURE, _HAS_EXPERTS,
            "it is for a gpt without experts", "use precision bf16 or fp16"),
    refused(_PURE, ("tp above 1", "pp above 1"),
            "parts of a model have float32 weights",
            "drop {other}, or use precision bf16 or fp16"),
    refused(_PURE, ("optimizer muon", "momentum above 0"),
            "only adamw and plain sgd round to 16 bits",
            "use optimizer adamw, or precision bf16 or fp16"),
    refused(_PURE, "dp_mode fsdp", "it shards float32 weights",
            "use dp_mode zero2, or precision bf16 with fsdp_gather bf16"),

    # Compressed gradients
    refused("grad_compress", "dp_mode other than ddp_by_hand",
            "its buckets alone are summed in 16 bits",
            "use dp_mode ddp_by_hand, or drop grad_compress"),
    refused("grad_compress", _CUT,
            "only whole models have compressed gradients", "drop {other}, or grad_compress"),
    refused("grad_compress", _PURE,
            "gradients have 16 bits already", "use precision bf16, or drop grad_compress"),

    # Recovery
    ignored("spares other than auto and 0", "recovery restart",
            "starts all ranks anew", "use recovery in_place, or drop spares"),

    # Audits: another rank computes the gradient of a micro batch again, with its own weights
    refused("audit_every above 0", _CUT,
            f"a rank has a part of the model, {_NO_GRADIENT}",
            "use audit_every 0, or drop {other}"),
    refused("audit_every above 0", "cp above 1",
            f"a rank has a part of each sequence, {_NO_GRADIENT}",
            "use audit_every 0, or drop cp"),
    refused("audit_every above 0", "dp_mode fsdp",
            f"a rank has a part of the weights, {_NO_GRADIENT}",
            "use audit_every 0, or another dp_mode"),
    refused("audit_every above 0", "sync_batchnorm True",
            "a rank's gradient needs all ranks' batches",
            "use audit_every 0, or drop sync_batchnorm"),
    refused("audit_every above 0", "model own",
            "only a rank itself has its batches and draws", "use audit_every 0"),

    # Instruments
    refused("statistics_every above 0", _NOT_WHOLE,
            "rank 0 has only a part of the weights or gradients",
            "use dp_mode ddp or ddp_by_hand, or drop statistics_every"),
    refused("statistics_every above 0", _CUT,
            "rank 0 has only a part of the weights or gradients",
            "use {other} 1, or drop statistics_every"),
    refused("statistics_every above 0", "cp above 1",
            "rank 0 has a part of each sequence, and attention needs all of it",
            "use cp 1, or drop statistics_every"),
    rule("profile max_steps num_epochs stop_at",
         "profile A:B: the run must reach step B - 1", sizes.profile_is_reached),

    # Object storage
    ignored("upload_timeout", "upload empty",
            "is empty", "give upload a URL, or drop upload_timeout"),
    rule("upload out_dir", "upload: another folder than out_dir", sizes.upload_is_elsewhere),
    rule("env upload resume",
         "env: without values of credentials of object storage", sizes.env_has_no_secret),

    # Known with the number of ranks. `workers = 1` decides the first ones early; with `auto` a plan
    # asks again
    ignored(NEED_RANKS, "workers 1", "",
            "start more ranks (--workers 2, or torchrun), or use --{asked} {default}",
            other_words="there is only one rank"),
    rule("workers cp tp pp", "workers: a multiple of cp * tp * pp", sizes.ranks_make_replicas),
    rule("dp_mode pp workers",
         "dp_mode ddp with pp: only without other data ranks", sizes.ddp_has_no_pipeline),
    rule("dp_mode replicas workers cp",
         "replicas with dp_mode zero1, zero2 or fsdp: several data ranks in each group",
         sizes.groups_shard_something),

    # Typed as a flag. These keys have defaults that presets change, so that what a file says is no
    # mistake
    rule("min_lr schedule lr", "min_lr: schedule cosine or wsd", sizes.min_lr_is_reached, typed=True),
    ignored("decay_fraction", "schedule other than wsd", "", "drop --{asked}", typed=True),
    # Plain sgd has no weight decay, but sgd with momentum has
    ignored("weight_decay", _NO_ADAM, "", "drop --{asked}", also="momentum 0", typed=True),
    ignored(("beta1", "beta2"), _NO_ADAM, "", "drop --{asked}", typed=True),
))
# fmt: on

# What a Layout asks for the number of ranks that it divides
_SHARING = tuple(row for row in TABLE if isinstance(row, Rule) and "workers" in row.keys)


def auto_on_gpus(config: Keys) -> str:
    """Return the attention that `auto` is on a GPU.

    Audits need gradients that have the same bits each time, which flash attention's do not.
    """
    return "plain" if config.audit_every else "flash"


# ---- questions to the table ----------------------------------------------------------------------


def first(
    config: Keys,
    *,
    ranks: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    about: Collection[str] = (),
    typed: Collection[str] = (),
) -> str | None:
    """Return the message of the first row that a configuration meets, or None.

    `ranks`, `device` (cuda, mig or cpu) and `precision` are what the keys workers, device and
    precision turned out to be, where the caller knows it. `about` limits the walk to rows that read
    one of these keys. `typed`: keys that are flags of the command line.
    """
    facts = {"workers": ranks, "device": device, "precision": precision}
    facts = {key: value for key, value in facts.items() if value is not None}
    # A copy is not validated, so this asks no row by itself
    if facts:
        config = config.model_copy(update=facts)

    for row in TABLE:
        if about and not set(about) & set(row.keys):
            continue
        if row.typed and row.keys[0] not in typed:
            continue
        # `workers` of a file may be another number than that of a dry run
        if row in _SHARING and ranks is None:
            continue
        problem = row.problem(config)
        if problem:
            return problem
    return None


def refuse(
    config: Keys,
    *,
    ranks: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    about: Collection[str] = (),
    typed: Collection[str] = (),
) -> None:
    """Raise ConfigError with the message of `first`, if there is one."""
    problem = first(
        config, ranks=ranks, device=device, precision=precision, about=about, typed=typed
    )
    if problem:
        raise ConfigError(problem)


def refuse_sharing(config: Keys, ranks: int) -> None:
    """Raise ConfigError unless the axes and modes of `config` can share this many ranks."""
    config = config.model_copy(update={"workers": ranks})
    for row in _SHARING:
        problem = row.problem(config)
        if problem:
            raise ConfigError(problem)
