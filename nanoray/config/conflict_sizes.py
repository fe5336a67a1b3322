"""The rules of arithmetic of the table of conflicts: sizes that must fit each other.

Each function returns the message, with a size that fits, or None. Those about ranks read the key
`workers` as the number of ranks, and find nothing while it is auto.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from nanoray.config.keys import Keys
from nanoray.config.mesh import IN_REPLICA, SHARDS_STATE
from nanoray.errors import ConfigError
from nanoray.machine.storage.url import is_secret, is_url, local_folder


def undivided_by_tp(
    tp: int, n_head: int, n_embd: int, padded_vocab: int | None = None, expert_hidden: int = 0
) -> str | None:
    """Return what tensor parallelism over `tp` ranks does not divide, and what helps, else None.

    `padded_vocab` is None where the vocabulary is not known yet.
    """
    sizes = {f"n_head = {n_head}": n_head, f"4*n_embd = 4*{n_embd} = {4 * n_embd}": 4 * n_embd}
    if padded_vocab is not None:
        sizes[f"the padded vocabulary = {padded_vocab}"] = padded_vocab
    if expert_hidden:
        sizes[f"expert_hidden = {expert_hidden}"] = expert_hidden

    # Heads, hidden units and rows of the vocabulary are what the ranks share
    undivided = [name for name, size in sizes.items() if size % tp]
    if not undivided:
        return None

    # No tp above n_head can work, since each rank has at least one head
    fitting = []
    for candidate in range(1, n_head + 1):
        if all(size % candidate == 0 for size in sizes.values()):
            fitting.append(str(candidate))
    return (
        f"tp = {tp} must divide {', '.join(sizes)}, but it does not divide "
        f"{' and '.join(undivided)}; use a tp of {', '.join(fitting)}"
    )


def require_divisible(
    tp: int, n_head: int, n_embd: int, padded_vocab: int | None = None, expert_hidden: int = 0
) -> None:
    """Raise ConfigError unless a GPT can be cut over `tp` ranks."""
    problem = undivided_by_tp(tp, n_head, n_embd, padded_vocab, expert_hidden)
    if problem:
        raise ConfigError(problem)


def require_groups(kind: str, pp: int, accum: int) -> None:
    """Raise ConfigError unless the micro batches of a step fit the schedule."""
    problem = _undivided_by_groups(kind, pp, accum)
    if problem:
        raise ConfigError(problem)


def _undivided_by_stages(pp: int, chunks: int, n_layer: int) -> str | None:
    parts = pp * chunks
    if n_layer % parts == 0:
        return None
    product = f"pp = {pp}"
    if chunks > 1:
        product = f"pp * chunks = {pp}*{chunks} = {parts}"
    # At least one layer for each chunk
    nearest = max(parts, round(n_layer / parts) * parts)
    return f"{product} does not divide n_layer = {n_layer}; use n_layer {nearest}, or another pp"


def _undivided_by_groups(kind: str, pp: int, accum: int) -> str | None:
    # The interleaved schedule sends pp micro batches through one chunk before it begins the next
    if kind != "interleaved" or accum % pp == 0:
        return None
    return (
        f"pp_schedule = interleaved takes micro batches in groups of pp = {pp}, but a step has "
        f"{accum}; set grad_accum_steps {-(-accum // pp) * pp}, or use pp_schedule 1f1b"
    )


def tp_divides(config: Keys) -> str | None:
    if config.tp == 1:
        return None
    # Each rank has a part of every expert, too; without a size experts are as wide as an MLP
    hidden = 0
    if config.experts:
        hidden = config.expert_hidden or 4 * config.n_embd
    return undivided_by_tp(config.tp, config.n_head, config.n_embd, expert_hidden=hidden)


def tp_divides_sequences(config: Keys) -> str | None:
    if not config.sequence_parallel or config.block_size % config.tp == 0:
        return None
    # Rounded up: a longer context loses nothing
    nearest = -(-config.block_size // config.tp) * config.tp
    return (
        f"sequence_parallel cuts sequences over tp = {config.tp} ranks, which does not divide "
        f"block_size = {config.block_size}; use block_size {nearest}, or drop sequence_parallel"
    )


def cp_divides_sequences(config: Keys) -> str | None:
    # Each rank has two of 2·cp equal parts of a sequence
    parts = 2 * config.cp
    cuts = f"cp = {config.cp} cuts sequences into 2*cp = {parts} parts, which does not divide"
    if config.cp > 1 and config.block_size % parts:
        nearest = -(-config.block_size // parts) * parts
        return f"{cuts} block_size = {config.block_size}; use block_size {nearest}, or another cp"
    # With tp, the ranks of a layer share what a rank has of a sequence
    own = config.block_size // config.cp
    if config.cp > 1 and config.sequence_parallel and own % config.tp:
        nearest = -(-own // (2 * config.tp)) * 2 * config.tp * config.cp
        return (
            f"cp = {config.cp} leaves a rank block_size/cp = {own} tokens, which "
            f"sequence_parallel cannot cut over tp = {config.tp} ranks; use block_size {nearest}, "
            "or drop sequence_parallel"
        )
    # The lengths of a warm-up double
    first = config.seq_warmup_from
    if config.cp > 1 and config.seq_warmup_steps and first % parts:
        return (
            f"{cuts} the {first} tokens with which seq_warmup_steps begins; use cp 2 or 4, or drop "
            "seq_warmup_steps"
        )
    return None


def stages_divide(config: Keys) -> str | None:
    if config.pp == 1:
        return None
    return _undivided_by_stages(config.pp, config.chunks, config.n_layer)


def groups_divide(config: Keys) -> str | None:
    # With a global batch the micro steps follow from the number of ranks: see cli/forecast/dry_run.py
    if config.pp == 1 or not config.grad_accum_steps or config.global_batch_size:
        return None
    return _undivided_by_groups(config.pp_schedule, config.pp, config.grad_accum_steps)


def ep_divides(config: Keys) -> str | None:
    if config.experts % config.ep == 0:
        return None
    fitting = [str(n) for n in range(1, config.experts + 1) if config.experts % n == 0]
    return (
        f"ep = {config.ep} does not divide experts = {config.experts}; use an ep of "
        f"{', '.join(fitting)}"
    )


# While num_epochs is not counted in steps, the last step is not known, and these rules find nothing.
# The configuration is built anew with max_steps when the data set is open, and so checked again.


def stop_is_reached(config: Keys) -> str | None:
    if config.stop_at <= config.scheduled_steps:
        return None
    return (
        f"stop_at = {config.stop_at} is beyond max_steps = {config.max_steps}; lower stop_at or "
        "raise max_steps"
    )


def warmup_is_reached(config: Keys) -> str | None:
    if config.seq_warmup_steps <= config.scheduled_steps:
        return None
    return (
        f"seq_warmup_steps = {config.seq_warmup_steps} is beyond max_steps = {config.max_steps}; "
        "lower it"
    )


def lengths_double(config: Keys) -> str | None:
    if not config.seq_warmup_steps:
        return None
    # The length doubles, so only block_size = 8 * 2^k is reached, with k of at least 1
    times, rest = divmod(config.block_size, config.seq_warmup_from)
    power_of_two = times & (times - 1) == 0
    if rest == 0 and times >= 2 and power_of_two:
        return None

    # The next smaller and the next larger size that the length reaches by doubling
    smaller = 2 * config.seq_warmup_from
    while 2 * smaller <= config.block_size:
        smaller *= 2
    return (
        f"block_size = {config.block_size} is not 2, 4, 8, ... times {config.seq_warmup_from}, the "
        f"tokens with which seq_warmup_steps begins; use block_size {smaller} or {2 * smaller}"
    )


def trace_is_reached(config: Keys) -> str | None:
    # Of every K steps, K/2 + 1 and K/2 + 2 are traced
    first_traced = config.trace_every // 2 + 1
    if first_traced <= config.last_step:
        return None
    return (
        f"comm_trace = {config.comm_trace} would trace nothing: its first step is {first_traced} "
        f"and the run ends at step {config.last_step}; use a smaller K, or always"
    )


def profile_is_reached(config: Keys) -> str | None:
    if not config.profile or config.profiled[-1] <= config.last_step:
        return None
    return (
        f"profile = {config.profile}, but the run ends at step {config.last_step}; use steps up "
        "to it"
    )


def upload_is_elsewhere(config: Keys) -> str | None:
    there = local_folder(config.upload)
    if there is None or there != Path(config.out_dir).expanduser().resolve():
        return None
    return (
        f"upload = {config.upload} is out_dir, where the run itself is written, so it would be no "
        "copy; give another folder"
    )


def env_has_no_secret(config: Keys) -> str | None:
    if not config.upload and not is_url(config.resume):
        return None
    for name, value in config.env.items():
        if value is not None and is_secret(name):
            return (
                f"env {name}=... would be written into config.json and sent to the storage; export "
                f"{name} in this command's shell, and give --env {name} alone if ranks need it"
            )
    return None


# ---- known with the number of ranks --------------------------------------------------------------


def ranks_make_replicas(config: Keys) -> str | None:
    """Each data replica takes cp*tp*pp of the ranks."""
    if config.workers == "auto":
        return None
    sizes = {axis: getattr(config, axis) for axis in IN_REPLICA if getattr(config, axis) > 1}
    share = prod(sizes.values())
    if config.workers % share == 0:
        return None
    axes = "*".join(sizes)
    value = "*".join(str(size) for size in sizes.values())
    if len(sizes) > 1:
        value += f" = {share}"
    more = -(-config.workers // share) * share
    return (
        f"ranks = dp*{axes}, but {axes} = {value} does not divide {config.workers} rank(s); use "
        f"{more} workers (--workers {more}, or torchrun --nproc-per-node {more}), or a "
        f"{axes} that divides {config.workers}"
    )


def ddp_has_no_pipeline(config: Keys) -> str | None:
    """torch's DDP averages along a pipeline only where there is nothing to average."""
    if config.workers == "auto" or config.pp == 1 or config.dp_mode != "ddp":
        return None
    # Ranks with other parts of the sequences share gradients as data replicas do
    dp = config.workers // config.replica_ranks
    if dp * config.cp == 1:
        return None
    replicas = f"dp = {dp}"
    if config.cp > 1:
        replicas += f" and cp = {config.cp}"
    return (
        f"dp_mode = ddp with pp = {config.pp} and {replicas}: torch's DDP expects the backward of "
        "a micro batch right after its forward, which no schedule keeps, and would average wrong "
        "gradients without an error; use dp_mode ddp_by_hand, zero1 or zero2"
    )


def groups_shard_something(config: Keys) -> str | None:
    """A group of replicas that has one rank shards nothing."""
    if config.workers == "auto" or config.dp_mode not in SHARDS_STATE:
        return None
    dp = config.workers // config.replica_ranks
    replicas = config.replicas
    if replicas == 1 or dp % replicas:
        return None
    if dp // replicas * config.cp > 1:
        return None
    return (
        f"dp_mode = {config.dp_mode} would be ignored: replicas = {replicas} on {dp} data ranks "
        "leaves one rank in each group, which shards nothing; use fewer replicas, or dp_mode "
        "ddp_by_hand without replicas"
    )


# ---- flags that were typed -----------------------------------------------------------------------


def min_lr_is_reached(config: Keys) -> str | None:
    """A constant rate ends where it began; a preset's min_lr is no mistake, a flag's is."""
    no_end = config.schedule == "constant"
    if not no_end or config.min_lr in (config.lr, Keys.model_fields["min_lr"].default):
        return None
    return f"min_lr = {config.min_lr} would be ignored: schedule = constant; drop --min_lr"
