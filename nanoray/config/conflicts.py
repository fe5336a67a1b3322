"""What does not go with what: one table of rows, one function that walks it.

A row is data: `asked` is what the user gave, `other` excludes it, `why` is the reason and `remedy`
is what to change. A new feature adds rows, not functions. Rules of arithmetic, such as a size that
must divide another one, are in the same table with a function each.

A row can be decided as soon as the values that it reads are known: most rows by the keys alone,
some by the number of ranks (the key `workers` may be auto) or by the device (`device` may be auto).
Callers that have these values pass them to `first`; the message is the same early and late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoray.base.storage.url import is_secret, is_url, local_folder
from nanoray.config.data import IMAGES
from nanoray.config.keys import Keys
from nanoray.config.mesh import BY_HAND, CUTS_MODEL, SHARDS_STATE, WHOLE_MODELS
from nanoray.config.optim import FRAGMENT_DELAY
from nanoray.config.spellings import PART_OF_FIELD, spell
from nanoray.errors import ConfigError

PURE = ("bf16_pure", "fp16_pure")  # values of precision whose weights have 16 bits

Known = Literal["keys", "ranks", "device"]


# ---- what a row is made of -----------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A predicate over the value of one key, and the words for it in docs/flags.md."""

    key: str
    words: str
    holds: Callable[[Any], bool]

    def met(self, config: Keys) -> bool:
        """Return whether the value of `config` meets the condition."""
        return self.holds(getattr(config, self.key))

    def value(self, config: Keys) -> str:
        """Write the key and its value, as users give them."""
        return spell(config, self.key)

    def brief(self, config: Keys) -> str:
        """Write the key and its value, but an axis without its size."""
        if self.key in CUTS_MODEL:
            return self.key
        return self.value(config)


def one_of(key: str, *values: Any) -> Condition:
    """The key has one of these values."""
    part = PART_OF_FIELD.get(key)
    words = f"{key} {' or '.join(str(value) for value in values)}"
    if part is not None:
        words = f"{part.key} {part.owners[0]}:{part.word(values[0])}"
    return Condition(key, words, lambda value: value in values)


def none_of(key: str, *values: Any) -> Condition:
    """The key has a value other than these."""
    words = " and ".join(str(value) for value in values)
    return Condition(key, f"{key} other than {words}", lambda value: value not in values)


def above(key: str, limit: int) -> Condition:
    """The key has a value above the limit."""
    return Condition(key, f"{key} above {limit}", lambda value: value > limit)


def given(key: str) -> Condition:
    """The key has a value other than its default, and one that asks for something.

    0, false and an empty text ask for nothing, wherever a key takes them: a factor, a wait.
    """
    default = Keys.model_fields[key].default
    return Condition(key, key, lambda value: value != default and bool(value))


@dataclass(frozen=True)
class Conflict:
    """Two settings that do not go together."""

    asked: Condition
    other: Condition
    why: str
    remedy: str
    also: Condition | None = None  # the row applies only if this is met, too
    ignored: bool = False  # the setting would have no effect; `why` follows the other's value
    other_words: str = ""  # in place of the other's key and value

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the row reads."""
        if self.also is None:
            return (self.asked.key, self.other.key)
        return (self.asked.key, self.other.key, self.also.key)

    def met(self, config: Keys) -> bool:
        """Return whether a configuration meets all conditions of the row."""
        if self.also is not None and not self.also.met(config):
            return False
        return self.asked.met(config) and self.other.met(config)

    def problem(self, config: Keys) -> str | None:
        """Return the message for a configuration that meets the row's conditions, else None."""
        if not self.met(config):
            return None
        asked = self.asked.value(config)
        other = self.other_words or self.other.value(config)
        if not self.ignored:
            return f"{asked} with {other}: {self.why}; {self.remedy}"
        reason = f"{other} {self.why}".rstrip()
        return f"{asked} would be ignored: {reason}; {self.remedy}"

    def brief(self, config: Keys) -> str:
        """Return the message without sizes of axes and without the remedy."""
        asked = self.asked.brief(config)
        other = self.other.brief(config)
        if self.ignored:
            return f"{asked} would be ignored: {other} {self.why}"
        return f"{asked} with {other}: {self.why}"


@dataclass(frozen=True)
class Rule:
    """A condition on several keys that needs arithmetic; `find` returns the message or None."""

    keys: tuple[str, ...]
    words: str
    find: Callable[[Keys], str | None]

    def problem(self, config: Keys) -> str | None:
        """Return the message for a configuration that breaks the rule, else None."""
        return self.find(config)


def known_from(row: Conflict | Rule) -> Known:
    """Return what must be known before a row can be decided."""
    if "workers" in row.keys:
        return "ranks"
    if "device" in row.keys:
        return "device"
    return "keys"


# ---- rules of arithmetic -------------------------------------------------------------------------


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


def require_stages(pp: int, chunks: int, n_layer: int) -> None:
    """Raise ConfigError unless n_layer divides into `pp` stages of `chunks` chunks each."""
    problem = _undivided_by_stages(pp, chunks, n_layer)
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


def _tp_divides(config: Keys) -> str | None:
    if config.tp == 1:
        return None
    # Each rank has a part of every expert, too; without a size experts are as wide as an MLP
    hidden = 0
    if config.experts:
        hidden = config.expert_hidden or 4 * config.n_embd
    return undivided_by_tp(config.tp, config.n_head, config.n_embd, expert_hidden=hidden)


def _tp_divides_sequences(config: Keys) -> str | None:
    if not config.sequence_parallel or config.block_size % config.tp == 0:
        return None
    # Rounded up: a longer context loses nothing
    nearest = -(-config.block_size // config.tp) * config.tp
    return (
        f"sequence_parallel cuts sequences over tp = {config.tp} ranks, which does not divide "
        f"block_size = {config.block_size}; use block_size {nearest}, or drop sequence_parallel"
    )


def _cp_divides_sequences(config: Keys) -> str | None:
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


def _fragments_fit(config: Keys) -> str | None:
    # A fragment must have arrived before it is sent again
    least = max(FRAGMENT_DELAY + 1, config.sync_fragments)
    if config.sync_fragments == 1 or config.sync_every >= least:
        return None
    return (
        f"sync_fragments = {config.sync_fragments} with sync_every = {config.sync_every}: each one "
        f"is sent after a step of its own, and travels for two steps; use sync_every {least} or "
        "more, or sync_fragments 1"
    )


def _stages_divide(config: Keys) -> str | None:
    if config.pp == 1:
        return None
    return _undivided_by_stages(config.pp, config.chunks, config.n_layer)


def _groups_divide(config: Keys) -> str | None:
    # With a global batch the micro steps follow from the number of ranks: see forecast/dry_run.py
    if config.pp == 1 or not config.grad_accum_steps or config.global_batch_size:
        return None
    return _undivided_by_groups(config.pp_schedule, config.pp, config.grad_accum_steps)


def _ep_divides(config: Keys) -> str | None:
    if config.experts % config.ep == 0:
        return None
    fitting = [str(n) for n in range(1, config.experts + 1) if config.experts % n == 0]
    return (
        f"ep = {config.ep} does not divide experts = {config.experts}; use an ep of "
        f"{', '.join(fitting)}"
    )


# While num_epochs is not counted in steps, the last step is not known, and these rules find nothing.
# The configuration is built anew with max_steps when the data set is open, and so checked again.


def _stop_is_reached(config: Keys) -> str | None:
    if config.stop_at <= config.scheduled_steps:
        return None
    return (
        f"stop_at = {config.stop_at} is beyond max_steps = {config.max_steps}; lower stop_at or "
        "raise max_steps"
    )


def _warmup_is_reached(config: Keys) -> str | None:
    if config.seq_warmup_steps <= config.scheduled_steps:
        return None
    return (
        f"seq_warmup_steps = {config.seq_warmup_steps} is beyond max_steps = {config.max_steps}; "
        "lower it"
    )


def _lengths_double(config: Keys) -> str | None:
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


def _trace_is_reached(config: Keys) -> str | None:
    # Of every K steps, K/2 + 1 and K/2 + 2 are traced
    first_traced = config.trace_every // 2 + 1
    if first_traced <= config.last_step:
        return None
    return (
        f"comm_trace = {config.comm_trace} would trace nothing: its first step is {first_traced} "
        f"and the run ends at step {config.last_step}; use a smaller K, or always"
    )


def _memory_is_reached(config: Keys) -> str | None:
    if config.memory_at <= config.last_step:
        return None
    return (
        f"memory_at = {config.memory_at} would record nothing: the run ends at step "
        f"{config.last_step}; use a step up to it"
    )


def _profile_is_reached(config: Keys) -> str | None:
    if not config.profile or config.profiled[-1] <= config.last_step:
        return None
    return (
        f"profile = {config.profile}, but the run ends at step {config.last_step}; use steps up "
        "to it"
    )


def _upload_is_elsewhere(config: Keys) -> str | None:
    there = local_folder(config.upload)
    if there is None or there != Path(config.out_dir).expanduser().resolve():
        return None
    return (
        f"upload = {config.upload} is out_dir, where the run itself is written, so it would be no "
        "copy; give another folder"
    )


def _env_has_no_secret(config: Keys) -> str | None:
    if not config.upload and not is_url(config.resume):
        return None
    for name, value in config.env.items():
        if value is not None and is_secret(name):
            return (
                f"env {name}=... would be written into config.json and sent to the storage; export "
                f"{name} in this command's shell, and give --env {name} alone if ranks need it"
            )
    return None


LONGEST_KEY = 1024  # bytes of an object's name, in S3 and in Google's storage
# Of what follows the run's folder in it, with room for long names of a rank's files
_IN_A_RUN = len("checkpoints/step_00000250/") + 64


def _keys_fit(config: Keys) -> str | None:
    if not config.upload or config.upload.startswith("file://"):
        return None
    folder = config.upload.partition("://")[2].partition("/")[2]
    longest = len(f"{folder}/2026-11-21_101500_{config.name}_999/".encode()) + _IN_A_RUN
    if longest <= LONGEST_KEY:
        return None
    return (
        f"upload and name make names of objects of {longest} bytes, and object storage takes "
        f"{LONGEST_KEY}; shorten the URL's folder or --name by {longest - LONGEST_KEY}"
    )


# ---- rows that several keys share ----------------------------------------------------------------

# Keys of one kind of model, and the kinds that have them. A script brings the layers of its own
# model, so only the keys of its text are left.
EXPERT_KEYS = (
    "experts_per_token",
    "expert_hidden",
    "shared_experts",
    "expert_capacity",
    "balance_loss",
    "z_loss",
    "ep",
)
_TEXT_KEYS = ("tokenizer",)
_GPT_KEYS = (
    "dropout",
    "bias",
    "scaling",
    "activation_checkpointing",
    "experts",
    *EXPERT_KEYS,
    "positions",
    "init_from",
    "gelu",
    "attention",
    "loss_chunk",
)
_RESNET_KEYS = ("resnet_depth", "label_smoothing")
_NORM_KEYS = ("sync_batchnorm",)


def _keys_of_models() -> list[Conflict]:
    rows = []
    for keys, models in (
        (_TEXT_KEYS, ("gpt", "own")),
        (_GPT_KEYS, ("gpt",)),
        (_RESNET_KEYS, ("resnet",)),
        (_NORM_KEYS, ("resnet", "own")),
    ):
        for key in keys:
            row = Conflict(
                given(key),
                none_of("model", *models),
                "has no such option",
                f"drop it, or use model {models[0]}",
                ignored=True,
            )
            rows.append(row)
    return rows


def _keys_of_experts() -> list[Conflict]:
    rows = []
    for key in EXPERT_KEYS:
        remedy = f"give experts 8, or drop {key}"
        rows.append(Conflict(given(key), one_of("experts", 0), "", remedy, ignored=True))
    return rows


def _only_whole_models(asked: Condition, why: str, remedy: str) -> list[Conflict]:
    """Rows of a feature that needs whole models: none of the axes may divide them."""
    rows = []
    for axis in CUTS_MODEL:
        rows.append(Conflict(asked, above(axis, 1), why, remedy.format(axis=axis)))
    return rows


ROUND_KEYS = ("outer_lr", "outer_momentum", "sync_fragments", "sync_bits")


def _keys_of_rounds() -> list[Conflict]:
    """Rows of keys that only replicas that rarely communicate have."""
    rows = []
    for key in ROUND_KEYS:
        remedy = f"give sync_every 50, or drop {key}"
        rows.append(Conflict(given(key), one_of("sync_every", 0), "", remedy, ignored=True))
    return rows


def _gradients_of_replicas() -> list[Conflict]:
    """Rows of how replicas exchange gradients, which they do not where they rarely communicate."""
    rows = []
    for key, idle in (("grad_compress", "none"), ("allreduce", "backend")):
        row = Conflict(
            given(key),
            above("sync_every", 0),
            "sends no gradients from replica to replica",
            f"use {key} {idle}; sync_bits 8 sends fewer bytes",
            ignored=True,
        )
        rows.append(row)
    return rows


def _fixed_addresses() -> list[Conflict]:
    """Rows of CUDA graphs, which repeat recorded kernels at fixed addresses and nothing else."""
    reasons = [
        (one_of("device", "cpu"), "a CPU has no kernels to launch"),
        (none_of("dp_mode", "ddp"), "it keeps gradients, or weights, in buckets of its own"),
        (above("tp", 1), "its ranks exchange activations within a layer"),
        (above("cp", 1), "its ranks exchange keys and values within a layer"),
        (above("pp", 1), "several micro batches are in flight at once"),
        (above("experts", 0), "how many tokens an expert gets is known in the step only"),
        (one_of("sync_batchnorm", True), "its ranks exchange statistics within a layer"),
        (above("audit_every", 0), "gradients of another rank's micro batch need other addresses"),
    ]
    rows = []
    for other, why in reasons:
        why = f"{why}, and a graph repeats what it has recorded"
        rows.append(Conflict(one_of("compile", "cuda_graphs"), other, why, "use compile true"))
    return rows


def _single_rank() -> list[Conflict]:
    """Rows of what needs a second rank: they are decided when the number of ranks is known."""
    rows = []
    for key, idle in (
        ("comm_trace", "off"),
        ("allreduce", "backend"),
        ("grad_compress", "none"),
        ("audit_every", 0),
        ("sync_every", 0),
    ):
        row = Conflict(
            given(key),
            one_of("workers", 1),
            "",
            f"start more ranks (--workers 2, or torchrun), or use --{key} {idle}",
            ignored=True,
            other_words="there is only one rank",
        )
        rows.append(row)
    return rows


# ---- the table -----------------------------------------------------------------------------------

# The first row that a configuration meets is its error, so what is most likely a mistake in typing
# stands above what needs thought.
TABLE: tuple[Conflict | Rule, ...] = (
    # Model
    *_keys_of_models(),
    *_keys_of_experts(),
    Conflict(
        one_of("scaling", "nanochat"),
        above("experts", 0),
        "its rules are for models without experts",
        "use scaling none",
    ),
    # Expert parallelism
    Rule(("ep", "experts"), "ep must divide experts", _ep_divides),
    Conflict(
        above("ep", 1),
        none_of("dp_mode", *BY_HAND),
        "it cannot sum the gradients of experts over other ranks than the rest",
        "use dp_mode ddp_by_hand, zero1 or zero2",
    ),
    # Data
    Conflict(
        none_of("dataset", "auto", *IMAGES),
        one_of("model", "resnet"),
        "the dataset is text, and a resnet learns from images",
        f"use dataset auto, {' or '.join(IMAGES)}",
    ),
    Conflict(
        one_of("dataset", *IMAGES),
        one_of("model", "gpt"),
        "the dataset has images, and a gpt learns from text",
        "use model resnet",
    ),
    Conflict(
        given("data_url"),
        none_of("dataset", "auto", "shakespeare", "cifar10"),
        "is not downloaded",
        "drop data_url, or use dataset shakespeare or cifar10",
        ignored=True,
    ),
    # Kernels
    # The loss in chunks needs the logits of the whole vocabulary, and computes gradients itself
    Conflict(
        above("loss_chunk", 0),
        above("tp", 1),
        "cuts the logits by tokens of the vocabulary",
        "drop one of the two",
        ignored=True,
    ),
    Conflict(
        above("loss_chunk", 0),
        one_of("precision", *PURE, "fp16"),
        "its gradients are computed before the loss is scaled, and 16 bits would lose the small "
        "ones",
        "use precision bf16, or drop loss_chunk",
    ),
    Conflict(
        one_of("attention", "cudnn"),
        one_of("device", "cpu"),
        "cuDNN's kernel needs a GPU",
        "use attention flash",
    ),
    Conflict(
        one_of("attention", "cudnn"),
        one_of("precision", "fp32", "tf32"),
        "cuDNN's kernel computes in 16 bits",
        "use attention flash",
    ),
    *_fixed_addresses(),
    # The backward of a fused kernel adds up in the order in which its blocks become ready, so the
    # last bits of healthy gradients differ from one time to the next.
    Conflict(
        above("audit_every", 0),
        one_of("attention", "flash", "cudnn"),
        "on a GPU the last bits of its gradients differ each time, so healthy ranks would look "
        "wrong",
        "use attention plain, or audit_every 0",
        also=one_of("device", "cuda", "mig"),
    ),
    # Optimizer
    Conflict(
        given("muon_lr"),
        none_of("optimizer", "muon"),
        "",
        "use optimizer muon, or drop it",
        ignored=True,
    ),
    # Muon orthogonalises each matrix of the blocks, so a rank must have it whole
    Conflict(
        one_of("optimizer", "muon"),
        none_of("model", "gpt"),
        "it is for the matrices of a gpt",
        "use optimizer adamw or sgd",
    ),
    Conflict(
        one_of("optimizer", "muon"),
        above("experts", 0),
        "it is for models without experts",
        "use optimizer adamw",
    ),
    Conflict(
        one_of("optimizer", "muon"),
        above("tp", 1),
        "it needs whole matrices",
        "use optimizer adamw, or drop tp",
    ),
    Conflict(
        one_of("optimizer", "muon"),
        above("pp", 1),
        "it needs whole matrices",
        "use optimizer adamw, or drop pp",
    ),
    Conflict(
        one_of("optimizer", "muon"),
        none_of("dp_mode", *WHOLE_MODELS),
        "it needs whole matrices",
        "use dp_mode ddp or ddp_by_hand, or optimizer adamw",
    ),
    Conflict(
        above("momentum", 0),
        none_of("optimizer", "sgd"),
        "has its own",
        "use optimizer sgd, or drop it",
        ignored=True,
    ),
    Conflict(
        one_of("nesterov", True),
        one_of("momentum", 0),
        "",
        "give momentum 0.9, or use optimizer sgd",
        ignored=True,
    ),
    Conflict(
        above("num_epochs", 0),
        one_of("scaling", "nanochat"),
        "derives max_steps from the model",
        "drop one of them",
        ignored=True,
    ),
    # Ends of a run
    Rule(("stop_at", "max_steps", "num_epochs"), "stop_at at most max_steps", _stop_is_reached),
    Conflict(
        above("target_loss", 0),
        one_of("eval_every", 0),
        "evaluates nothing",
        "raise eval_every, or drop target_loss",
        ignored=True,
    ),
    # Short sequences
    Rule(
        ("seq_warmup_steps", "max_steps", "num_epochs"),
        "seq_warmup_steps at most max_steps",
        _warmup_is_reached,
    ),
    Rule(
        ("seq_warmup_steps", "seq_warmup_from", "block_size"),
        "seq_warmup_steps: block_size must be 16, 32, 64, ...",
        _lengths_double,
    ),
    Conflict(
        above("seq_warmup_steps", 0),
        none_of("model", "gpt"),
        "only a gpt has sequences that can be cut",
        "drop one of the two",
    ),
    Conflict(
        above("seq_warmup_steps", 0),
        above("tp", 1),
        "its ranks pass each other sequences of block_size tokens",
        "drop one of the two",
    ),
    Conflict(
        above("seq_warmup_steps", 0),
        above("pp", 1),
        "its ranks pass each other sequences of block_size tokens",
        "drop one of the two",
    ),
    Conflict(
        above("seq_warmup_steps", 0),
        none_of("compile", False),
        "it would compile for each length, and a resumed run for other ones",
        "drop one of the two",
    ),
    # Process group and how gradients are summed
    Rule(
        ("comm_trace", "max_steps", "num_epochs", "stop_at"),
        "comm_trace every=K: the run must reach step K/2 + 1",
        _trace_is_reached,
    ),
    Conflict(
        one_of("backend", "nccl"),
        one_of("device", "cpu"),
        "NCCL needs GPUs",
        "use backend gloo or auto",
    ),
    # Hand-written all-reduces replace the one in torch's DDP, which sums over all ranks
    *_only_whole_models(given("allreduce"), "it sums over all ranks", "drop one of the two"),
    Conflict(
        given("allreduce"),
        none_of("dp_mode", "ddp"),
        "sums by its own exchange",
        "drop one of the two",
        ignored=True,
    ),
    Conflict(
        one_of("fsdp_gather", "bf16"),
        one_of("precision", "fp16"),
        "its layers cannot take weights of bf16",
        "use dp_mode fsdp",
    ),
    Conflict(
        one_of("fsdp_gather", "bf16"),
        one_of("model", "resnet"),
        "its layers cannot take weights of bf16",
        "use dp_mode fsdp",
    ),
    # Context parallelism
    Conflict(above("cp", 1), none_of("model", "gpt"), "it cuts the sequences of a gpt", "drop cp"),
    Conflict(
        above("cp", 1),
        above("experts", 0),
        "capacity and balance of experts are those of a whole sequence",
        "drop one of the two",
    ),
    Rule(
        ("cp", "block_size", "tp", "sequence_parallel", "seq_warmup_steps", "seq_warmup_from"),
        "cp: 2 * cp must divide block_size",
        _cp_divides_sequences,
    ),
    Conflict(
        given("cp_attention"),
        one_of("cp", 1),
        "cuts no sequences",
        "raise cp, or drop cp_attention",
        ignored=True,
    ),
    Conflict(
        one_of("attention", "cudnn"),
        above("cp", 1),
        "cuDNN's kernel is not written for parts of sequences",
        "use attention flash",
    ),
    # The ranks of a sequence draw one mask, each its rows of it; a fused kernel draws its own
    Conflict(
        above("cp", 1),
        one_of("attention", "flash"),
        "with dropout, a fused kernel would draw another mask for each part of a sequence",
        "use attention plain, or dropout 0",
        also=above("dropout", 0),
    ),
    # Hybrid sharding
    Conflict(
        above("replicas", 1),
        none_of("dp_mode", *SHARDS_STATE),
        "shards nothing: every rank is a replica already",
        "use dp_mode zero1, zero2 or fsdp, or drop replicas",
        also=one_of("sync_every", 0),
        ignored=True,
    ),
    Conflict(
        above("ep", 1),
        above("replicas", 1),
        "each divides the data ranks in a way of its own",
        "drop one of the two",
    ),
    # Replicas that rarely communicate
    *_keys_of_rounds(),
    # A script's model and a resnet have buffers, or parameters without a gradient, of each replica
    Conflict(
        above("sync_every", 0),
        none_of("model", "gpt"),
        "only the weights of a gpt are averaged, and other models have buffers, too",
        "use sync_every 0",
    ),
    Conflict(
        above("sync_every", 0),
        one_of("precision", *PURE),
        "what an outer optimizer adds is lost in weights of 16 bits",
        "use precision bf16 or fp16, or sync_every 0",
    ),
    Conflict(
        above("sync_every", 0),
        above("ep", 1),
        "experts are shared by all data ranks, which each of its steps would need",
        "drop ep, or use sync_every 0",
    ),
    Conflict(
        above("audit_every", 0),
        above("sync_every", 0),
        "the weights of another replica differ, so it cannot compute a gradient again",
        "use audit_every 0, or sync_every 0",
    ),
    *_gradients_of_replicas(),
    Rule(
        ("sync_fragments", "sync_every"),
        "sync_fragments: at most sync_every, which is 3 or more",
        _fragments_fit,
    ),
    # Tensor parallelism
    Conflict(above("tp", 1), none_of("model", "gpt"), "it cuts the layers of a gpt", "drop tp"),
    Conflict(
        one_of("sequence_parallel", True),
        one_of("tp", 1),
        "shares no sequences",
        "use tp 2, or drop sequence_parallel",
        ignored=True,
    ),
    Rule(
        ("tp", "n_head", "n_embd", "experts", "expert_hidden"),
        "tp must divide n_head, 4 * n_embd and expert_hidden",
        _tp_divides,
    ),
    Rule(
        ("sequence_parallel", "tp", "block_size"),
        "sequence_parallel: tp must divide block_size",
        _tp_divides_sequences,
    ),
    # Pipelines
    Conflict(
        given("pp_schedule"),
        one_of("pp", 1),
        "is no pipeline",
        "raise pp, or drop it",
        ignored=True,
    ),
    Conflict(
        one_of("pp_chunks", 1),
        one_of("pp_schedule", "interleaved"),
        "with one chunk it is the schedule 1f1b",
        "use pp_schedule 1f1b, or at least 2 chunks",
    ),
    Conflict(above("pp", 1), none_of("model", "gpt"), "it splits the blocks of a gpt", "drop pp"),
    Conflict(
        one_of("dp_mode", "fsdp"),
        above("pp", 1),
        "each turn of a micro batch would gather a stage's weights anew",
        "use dp_mode zero2, which shards all but the weights, or drop pp",
    ),
    # zero_bubble computes gradients of inputs first and those of weights later, in idle time
    Conflict(
        one_of("pp_schedule", "zero_bubble"),
        none_of("compile", False),
        "a compiled block computes both halves of its backward at once",
        "use pp_schedule 1f1b, or drop compile",
    ),
    Conflict(
        one_of("pp_schedule", "zero_bubble"),
        given("activation_checkpointing"),
        "each half of a backward would compute the forward again",
        "use pp_schedule 1f1b, or drop activation_checkpointing",
    ),
    Conflict(
        one_of("pp_schedule", "zero_bubble"),
        one_of("dp_mode", "zero2"),
        "it sums after each backward, and there are two",
        "use pp_schedule 1f1b, or drop dp_mode zero2",
    ),
    Rule(("pp", "pp_chunks", "n_layer"), "pp * chunks must divide n_layer", _stages_divide),
    Rule(
        ("pp_schedule", "pp", "grad_accum_steps", "global_batch_size"),
        "pp_schedule interleaved: pp must divide grad_accum_steps",
        _groups_divide,
    ),
    # Number formats
    Conflict(
        one_of("precision", "tf32"),
        one_of("device", "cpu"),
        "tf32 is a format of GPUs",
        "use precision fp32",
    ),
    # fp8 replaces linear layers by ones of its own, which only a plain gpt has been given
    Conflict(
        one_of("precision", "fp8"),
        none_of("model", "gpt"),
        "it is for the linear layers of a gpt",
        "use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        above("experts", 0),
        "it is for a gpt without experts",
        "use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        above("tp", 1),
        "8-bit products are not written for parts of layers",
        "drop tp, or use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        above("pp", 1),
        "8-bit products are not written for stages",
        "drop pp, or use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        none_of("compile", False),
        "8-bit products are not written for compiled blocks",
        "drop compile, or use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        given("activation_checkpointing"),
        "8-bit products are not written for a second forward",
        "drop activation_checkpointing, or use precision bf16",
    ),
    Conflict(
        one_of("precision", "fp8"),
        one_of("dp_mode", "fsdp"),
        "8-bit products are not written for gathered weights",
        "drop dp_mode fsdp, or use precision bf16",
    ),
    Conflict(
        one_of("rounding", "stochastic"),
        one_of("master_weights", "fp32"),
        "it is for weights without a float32 copy",
        "use one of the two",
    ),
    # 16-bit weights have an optimizer of their own, which rounds each update
    Conflict(
        one_of("precision", *PURE),
        none_of("model", "gpt"),
        "it stores the weights of a gpt in 16 bits",
        "use precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        above("experts", 0),
        "it is for a gpt without experts",
        "use precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        above("tp", 1),
        "parts of a model have float32 weights",
        "drop tp, or use precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        above("pp", 1),
        "parts of a model have float32 weights",
        "drop pp, or use precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        one_of("optimizer", "muon"),
        "only adamw and plain sgd round to 16 bits",
        "use optimizer adamw, or precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        above("momentum", 0),
        "only adamw and plain sgd round to 16 bits",
        "use optimizer adamw, or precision bf16 or fp16",
    ),
    Conflict(
        one_of("precision", *PURE),
        one_of("dp_mode", "fsdp"),
        "it shards float32 weights",
        "use dp_mode zero2, or precision bf16 with dp_mode fsdp:bf16",
    ),
    # Compressed gradients
    Conflict(
        given("grad_compress"),
        none_of("dp_mode", *WHOLE_MODELS),
        "compressed sums go to all ranks, and it shards them",
        "use dp_mode ddp or ddp_by_hand, or drop grad_compress",
    ),
    Conflict(
        given("grad_compress"),
        given("allreduce"),
        "compressed gradients have exchanges of their own",
        "drop one of the two",
    ),
    *_only_whole_models(
        given("grad_compress"),
        "only whole models have compressed gradients",
        "drop {axis}, or grad_compress",
    ),
    Conflict(
        given("grad_compress"),
        one_of("precision", *PURE),
        "gradients have 16 bits already",
        "use precision bf16, or drop grad_compress",
    ),
    # Recovery
    Conflict(
        none_of("spares", "auto", 0),
        one_of("recovery", "restart"),
        "starts all ranks anew",
        "use recovery in_place, or drop spares",
        ignored=True,
    ),
    # Audits: another rank computes the gradient of a micro batch again, with its own weights
    *_only_whole_models(
        above("audit_every", 0),
        "a rank has a part of the model, so no other rank can compute its gradient alone",
        "use audit_every 0, or drop {axis}",
    ),
    Conflict(
        above("audit_every", 0),
        above("cp", 1),
        "a rank has a part of each sequence, so no other rank can compute its gradient alone",
        "use audit_every 0, or drop cp",
    ),
    Conflict(
        above("audit_every", 0),
        one_of("dp_mode", "fsdp"),
        "a rank has a part of the weights, so no other rank can compute its gradient alone",
        "use audit_every 0, or another dp_mode",
    ),
    Conflict(
        above("audit_every", 0),
        one_of("sync_batchnorm", True),
        "a rank's gradient needs all ranks' batches",
        "use audit_every 0, or drop sync_batchnorm",
    ),
    Conflict(
        above("audit_every", 0),
        one_of("model", "own"),
        "only a rank itself has its batches and draws",
        "use audit_every 0",
    ),
    # Instruments
    Conflict(
        above("statistics_every", 0),
        none_of("dp_mode", *WHOLE_MODELS),
        "rank 0 has only a part of the weights or gradients",
        "use dp_mode ddp or ddp_by_hand, or drop statistics_every",
    ),
    *_only_whole_models(
        above("statistics_every", 0),
        "rank 0 has only a part of the weights or gradients",
        "use {axis} 1, or drop statistics_every",
    ),
    Conflict(
        above("statistics_every", 0),
        above("cp", 1),
        "rank 0 has a part of each sequence, and attention needs all of it",
        "use cp 1, or drop statistics_every",
    ),
    Rule(
        ("memory_at", "max_steps", "num_epochs", "stop_at"),
        "memory_at: the run must reach that step",
        _memory_is_reached,
    ),
    Conflict(
        above("memory_at", 0),
        none_of("compile", False),
        "allocations of compiled layers cannot be seen",
        "drop one of the two",
    ),
    Rule(
        ("profile", "max_steps", "num_epochs", "stop_at"),
        "profile A:B: the run must reach step B - 1",
        _profile_is_reached,
    ),
    Conflict(
        given("profile"),
        given("comm_trace"),
        "both need torch.profiler, of which a process has one",
        "drop one of the two",
    ),
    # Object storage
    Conflict(
        given("upload_timeout"),
        one_of("upload", ""),
        "is empty",
        "give upload a URL, or drop upload_timeout",
        ignored=True,
    ),
    Rule(
        ("upload", "name"),
        f"upload: names of objects have at most {LONGEST_KEY} bytes",
        _keys_fit,
    ),
    Rule(
        ("upload", "out_dir"),
        "upload: another folder than out_dir",
        _upload_is_elsewhere,
    ),
    Rule(
        ("env", "upload", "resume"),
        "env: without values of credentials of object storage",
        _env_has_no_secret,
    ),
    # Known with the number of ranks. `workers = 1` decides them early; with `auto` a plan asks again
    *_single_rank(),
)


def auto_on_gpus(config: Keys) -> str:
    """Return the attention that `auto` is on a GPU.

    Audits need gradients that have the same bits each time, which flash attention's do not. Ranks
    that share sequences need masks of dropout that are drawn outside of a kernel.
    """
    if config.audit_every or (config.cp > 1 and config.dropout):
        return "plain"
    return "flash"


# ---- questions to the table ----------------------------------------------------------------------


def first(
    config: Keys,
    *,
    ranks: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    about: Collection[str] = (),
) -> str | None:
    """Return the message of the first row that a configuration meets, or None.

    `ranks`, `device` (cuda, mig or cpu) and `precision` are what the keys workers, device and
    precision turned out to be, where the caller knows it. `about` limits the walk to rows that read
    one of these keys.
    """
    facts = {"workers": ranks, "device": device, "precision": precision}
    facts = {key: value for key, value in facts.items() if value is not None}
    # A copy is not validated, so this asks no row by itself
    if facts:
        config = config.model_copy(update=facts)

    for row in TABLE:
        if about and not set(about) & set(row.keys):
            continue
        problem = row.problem(config)
        if problem:
            return problem
    return None


def excluded_layout(
    config: Keys, dp_mode: str, axes: Mapping[str, int], experts: int
) -> str | None:
    """Return which row excludes a layout of the ranks, in a few words without sizes; None if none.

    For the search of layouts, which tries other axes than the configuration's. Rules of arithmetic
    are not asked.
    """
    config = config.model_copy(update={**axes, "dp_mode": dp_mode, "experts": experts})
    divided = {axis for axis, size in axes.items() if size > 1}
    for row in TABLE:
        if isinstance(row, Conflict) and divided & set(row.keys) and row.met(config):
            return row.brief(config)
    return None


def refuse(
    config: Keys,
    *,
    ranks: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    about: Collection[str] = (),
) -> None:
    """Raise ConfigError with the message of `first`, if there is one."""
    problem = first(config, ranks=ranks, device=device, precision=precision, about=about)
    if problem:
        raise ConfigError(problem)
