"""Names that other programs have for keys of ours: one table, asked when a key is unknown.

A user of nanoGPT types `--learning_rate`, one of Hugging Face `per_device_train_batch_size`. Each
gets our name, and how the value changes where it is not the same thing. A name that two programs use
in different ways has a row for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Words of number formats, and the values of `precision` for them
FORMATS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "32-true": "fp32",
    "32": "fp32",
}
_DEVICES = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "auto": "auto"}

# Words of other programs for values of our keys
VALUES: dict[str, Mapping[str, str]] = {
    "precision": FORMATS,
    "device": {"gpu": "cuda", "cuda:0": "cuda", "mps": "cpu"},
    "activation_checkpointing": {"full": "block", "true": "block", "false": "none"},
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam": "adamw"},
    "schedule": {
        "linear": "wsd",
        "cosine_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
    },
    "dp_mode": {"zero3": "fsdp", "fsdp2": "fsdp", "full_shard": "fsdp", "shard_grad_op": "zero2"},
    "pp_schedule": {"interleaved1f1b": "interleaved", "zbvzerobubble": "zero_bubble"},
}


@dataclass(frozen=True)
class Name:
    """One program's name for something, and ours for it."""

    theirs: str
    program: str
    ours: tuple[str, ...]  # keys of ours; empty where there is none
    how: str = ""  # how the value changes, or what to do where there is no key
    values: Mapping[str, str] | None = None  # their words and ours

    def value_of(self, given: str) -> str:
        """Return our value for theirs; "" where it is not the same thing, or unknown."""
        if self.how or len(self.ours) != 1 or not given:
            return ""
        if self.values is None:
            return given
        return self.values.get(given.lower(), "")


def _names(program: str, *rows: tuple[Any, ...]) -> list[Name]:
    """Return the names of a program. A row: their name, ours or several, how, words of values."""
    names = []
    for theirs, ours, *rest in rows:
        keys = tuple(ours.split())
        names.append(Name(theirs, program, keys, *rest))
    return names


# On a GPU the backward of a fused attention adds up in another order each time
_SAME_BITS = "on a CPU the same seed and ranks give the same bits; on GPUs with attention plain"

NANOGPT = _names(
    "nanoGPT",
    ("learning_rate", "lr"),
    ("max_iters", "max_steps"),
    ("warmup_iters", "warmup_steps"),
    (
        "lr_decay_iters",
        "max_steps",
        "the rate falls until max_steps; to end before that, add stop_at",
    ),
    ("decay_lr", "schedule", "false is constant"),
    (
        "batch_size",
        "micro_batch_size",
        "sequences of a rank in one forward pass; of a whole step: global_batch_size",
    ),
    (
        "gradient_accumulation_steps",
        "global_batch_size",
        "there it counts all ranks, so global_batch_size is batch_size x "
        "gradient_accumulation_steps",
    ),
    ("eval_interval", "eval_every"),
    ("eval_iters", "eval_samples", "in sequences: eval_iters x batch_size"),
    ("log_interval", "log_every"),
    (
        "eval_only",
        "",
        "`nanoray checkpoint show RUN` prints the losses of a run, `nanoray sample RUN` its text",
    ),
    (
        "always_save_checkpoint",
        "checkpoint_every",
        "in steps; the best checkpoint is kept besides the newest",
    ),
    ("dtype", "precision", "", FORMATS),
    ("wandb_log", "track", "track wandb"),
    ("wandb_project", "track", "with track wandb its own variable says it: WANDB_PROJECT"),
    ("wandb_run_name", "name", "with track wandb"),
    ("vocab_size", "tokenizer", "the tokenizer or the data set decides the vocabulary"),
    ("meta_vocab_size", "tokenizer", "the tokenizer or the data set decides the vocabulary"),
)

NANOCHAT = _names(
    "nanochat",
    ("depth", "n_layer", "there it decides n_embd and n_head, too; see --preset nanochat-d12"),
    ("aspect_ratio", "n_embd", "n_embd is aspect_ratio x n_layer"),
    ("head_dim", "n_head", "n_head is n_embd / head_dim"),
    ("max_seq_len", "block_size"),
    ("num_iterations", "max_steps"),
    ("target_param_data_ratio", "tokens_per_param", "with scaling nanochat"),
    ("target_flops", "scaling", "nanochat derives the steps, from tokens_per_param"),
    ("device_batch_size", "micro_batch_size"),
    (
        "total_batch_size",
        "global_batch_size",
        "there in tokens, here in sequences: divide it by block_size",
    ),
    ("matrix_lr", "muon_lr"),
    ("embedding_lr", "lr", "one rate for all that Muon does not update"),
    ("unembedding_lr", "lr", "one rate for all that Muon does not update"),
    ("scalar_lr", "lr", "one rate for all that Muon does not update"),
    ("adam_beta1", "beta1"),
    ("adam_beta2", "beta2"),
    ("warmup_ratio", "warmup_steps", "in steps: warmup_ratio x max_steps"),
    ("warmdown_ratio", "decay_fraction", "with schedule wsd"),
    ("final_lr_frac", "min_lr", "as a rate: final_lr_frac x lr"),
    ("resume_from_step", "resume", "the path of the run, or of one of its checkpoints"),
    ("eval_tokens", "eval_samples", "in sequences: eval_tokens / block_size"),
    ("save_every", "checkpoint_every"),
    ("sample_every", "sample_tokens", "text is generated at the end; `nanoray sample RUN` before"),
    ("device_type", "device", "", _DEVICES),
    ("model_tag", "name"),
    ("run", "name", "there it also begins a run at Weights & Biases: track wandb"),
    ("fp8", "precision", "precision fp8"),
    ("fp8_recipe", "precision", "fp8 has one scale for a tensor, fp8:row one for a row"),
    ("window_pattern", "", "every layer attends to the whole context"),
    ("core_metric_every", "", "nanoray measures the loss alone"),
)

HUGGING_FACE = _names(
    "Hugging Face",
    ("output_dir", "out_dir"),
    ("run_name", "name"),
    ("report_to", "track", "wandb, mlflow or none; TensorBoard has the key tensorboard"),
    ("model_name_or_path", "init_from", "a folder: nothing is downloaded"),
    ("learning_rate", "lr"),
    ("per_device_train_batch_size", "micro_batch_size"),
    ("train_batch_size", "micro_batch_size"),
    ("per_device_eval_batch_size", "eval_samples", "of all ranks in an evaluation"),
    ("gradient_accumulation_steps", "grad_accum_steps"),
    ("num_train_epochs", "num_epochs"),
    ("max_grad_norm", "grad_clip"),
    ("adam_beta1", "beta1"),
    ("adam_beta2", "beta2"),
    ("adam_epsilon", "", "it is 1e-8, as in torch; drop it"),
    ("lr_scheduler_type", "schedule", "cosine, constant, or wsd with its linear decay"),
    ("warmup_ratio", "warmup_steps", "in steps: warmup_ratio x max_steps"),
    (
        "optim",
        "optimizer",
        "",
        {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"},
    ),
    ("logging_steps", "log_every"),
    ("logging_dir", "out_dir", "TensorBoard's events are in the run's folder, under tb/"),
    ("eval_steps", "eval_every"),
    ("eval_strategy", "eval_every", "in steps; 0 is never"),
    ("evaluation_strategy", "eval_every", "in steps; 0 is never"),
    ("save_steps", "checkpoint_every"),
    ("save_strategy", "checkpoint_every", "in steps; 0 is at the end only"),
    ("save_total_limit", "keep_checkpoints"),
    ("load_best_model_at_end", "", "the best checkpoint is kept in any case; drop it"),
    ("resume_from_checkpoint", "resume", "auto, or the path of a run or checkpoint"),
    ("overwrite_output_dir", "", "each run has a folder of its own in out_dir; drop it"),
    ("gradient_checkpointing", "activation_checkpointing", "block, or selective"),
    ("torch_compile", "compile"),
    ("bf16", "precision", "precision bf16"),
    ("fp16", "precision", "precision fp16"),
    ("tf32", "precision", "precision tf32"),
    ("bf16_full_eval", "precision", "an evaluation computes as training does"),
    ("ddp_backend", "backend"),
    ("ddp_timeout", "timeout_s"),
    ("ddp_timeout_seconds", "timeout_s"),
    ("ddp_bucket_cap_mb", "bucket_mb"),
    ("fsdp", "dp_mode", "dp_mode fsdp, or fsdp:grad_op"),
    ("fsdp_config", "dp_mode", "dp_mode fsdp, or fsdp:grad_op"),
    ("deepspeed", "dp_mode", "zero1 and zero2 are stages 1 and 2, fsdp is stage 3"),
    ("label_smoothing_factor", "label_smoothing"),
    ("data_seed", "seed"),
    ("use_cpu", "device", "device cpu"),
    ("no_cuda", "device", "device cpu"),
    ("local_rank", "", "the launcher sets LOCAL_RANK; drop it"),
    ("dataloader_num_workers", "", "tokens are read from a memory map, without workers; drop it"),
    ("do_train", "", "`python -m nanoray.train` always trains; drop it"),
    ("do_eval", "eval_every", "in steps; 0 is never"),
    ("dataset_name", "dataset"),
    ("train_file", "dataset"),
    ("max_train_samples", "max_steps", "in steps: max_train_samples / global_batch_size"),
    ("max_eval_samples", "eval_samples"),
    ("max_seq_length", "block_size"),
    ("tokenizer_name", "tokenizer", "auto, char, byte or gpt2"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("hidden_size", "n_embd"),
    ("n_positions", "block_size"),
    ("n_ctx", "block_size"),
    ("max_position_embeddings", "block_size"),
    ("resid_pdrop", "dropout"),
    ("embd_pdrop", "dropout"),
    ("attn_pdrop", "dropout"),
)

TORCHTITAN = _names(
    "torchtitan",
    ("job.config_file", "config", "a YAML file, of nanoray's keys"),
    ("job.dump_folder", "out_dir"),
    ("model.flavor", "preset", "the sizes are n_layer, n_head, n_embd, or a preset's"),
    ("model.tokenizer_path", "tokenizer", "auto, char, byte or gpt2"),
    ("model.hf_assets_path", "tokenizer", "auto, char, byte or gpt2"),
    ("training.steps", "max_steps"),
    ("training.seq_len", "block_size"),
    ("training.local_batch_size", "micro_batch_size"),
    ("training.global_batch_size", "global_batch_size"),
    ("training.max_norm", "grad_clip"),
    ("training.dataset", "dataset"),
    ("training.dataset_path", "dataset"),
    ("training.mixed_precision_param", "precision", "", FORMATS),
    ("training.compile", "compile"),
    ("training.seed", "seed"),
    ("training.deterministic", "attention", _SAME_BITS),
    (
        "training.enable_cpu_offload",
        "dp_mode",
        "fsdp shares the state between ranks; none is offloaded",
    ),
    ("debug.seed", "seed"),
    ("debug.deterministic", "attention", _SAME_BITS),
    ("optimizer.name", "optimizer", "", {"adamw": "adamw", "muon": "muon"}),
    ("optimizer.lr", "lr"),
    ("optimizer.beta1", "beta1"),
    ("optimizer.beta2", "beta2"),
    ("optimizer.eps", "", "it is 1e-8, as in torch; drop it"),
    ("optimizer.weight_decay", "weight_decay"),
    ("optimizer.implementation", "", "the fused one is taken; drop it"),
    ("lr_scheduler.warmup_steps", "warmup_steps"),
    ("lr_scheduler.decay_ratio", "decay_fraction", "with schedule wsd"),
    ("lr_scheduler.decay_type", "schedule", "cosine, or wsd with its linear decay"),
    ("lr_scheduler.lr_min", "min_lr", "as a rate: lr_min x lr"),
    ("lr_scheduler.min_lr_factor", "min_lr", "as a rate: min_lr_factor x lr"),
    (
        "parallelism.data_parallel_replicate_degree",
        "replicas",
        "with dp_mode zero1, zero2 or fsdp; in ddp each data rank is a replica",
    ),
    (
        "parallelism.data_parallel_shard_degree",
        "dp_mode replicas",
        "fsdp shards over the data ranks, or over those of each of the replicas",
    ),
    ("parallelism.fsdp_reshard_after_forward", "dp_mode", "never is dp_mode fsdp:grad_op"),
    ("parallelism.tensor_parallel_degree", "tp"),
    ("parallelism.pipeline_parallel_degree", "pp"),
    ("parallelism.expert_parallel_degree", "ep"),
    (
        "parallelism.pipeline_parallel_schedule",
        "pp_schedule",
        "",
        {
            "gpipe": "gpipe",
            "1f1b": "1f1b",
            "interleaved1f1b": "interleaved",
            "zbvzerobubble": "zero_bubble",
            "interleavedzerobubble": "zero_bubble",
        },
    ),
    (
        "parallelism.pipeline_parallel_microbatch_size",
        "micro_batch_size",
        "each micro batch passes through the pipeline by itself",
    ),
    ("parallelism.context_parallel_degree", "cp"),
    (
        "parallelism.context_parallel_rotate_method",
        "cp_attention",
        "",
        {"allgather": "all_gather", "alltoall": "ring"},
    ),
    ("activation_checkpoint.mode", "activation_checkpointing", "block is full"),
    ("checkpoint.interval", "checkpoint_every"),
    ("checkpoint.folder", "out_dir"),
    ("checkpoint.keep_latest_k", "keep_checkpoints"),
    ("checkpoint.async_mode", "checkpoint_mode", "async, or sync for disabled"),
    ("checkpoint.enable", "checkpoint_every", "in steps; 0 is at the end only"),
    ("checkpoint.enable_checkpoint", "checkpoint_every", "in steps; 0 is at the end only"),
    ("checkpoint.initial_load_path", "init_from", "weights of GPT-2, nanoGPT or nanoray"),
    ("checkpoint.load_step", "resume", "the path of one of the run's checkpoints"),
    ("compile.enable", "compile"),
    ("metrics.log_freq", "log_every"),
    ("metrics.enable_tensorboard", "tensorboard"),
    ("metrics.enable_wandb", "track", "track wandb"),
    ("validation.freq", "eval_every"),
    ("validation.steps", "eval_samples", "in sequences of all ranks"),
    ("profiling.enable_profiling", "profile", "the steps A:B"),
    ("profiling.profile_freq", "profile", "the steps A:B"),
    ("comm.init_timeout_seconds", "init_timeout_s"),
    ("comm.train_timeout_seconds", "timeout_s"),
    ("fault_tolerance.sync_steps", "sync_every"),
    ("fault_tolerance.semi_sync_method", "sync_every", "diloco is sync_every 50"),
    ("fault_tolerance.should_quantize", "sync_bits", "true is 8"),
    ("fault_tolerance.enable", "recovery", "in_place replaces a lost rank, in any run on Ray"),
)

LIGHTNING = _names(
    "Lightning",
    ("max_epochs", "num_epochs"),
    ("accelerator", "device", "", _DEVICES),
    ("devices", "workers"),
    ("num_nodes", "workers", "all ranks of all nodes together"),
    ("strategy", "dp_mode", "ddp, zero1, zero2 or fsdp"),
    ("accumulate_grad_batches", "grad_accum_steps"),
    ("gradient_clip_val", "grad_clip"),
    ("log_every_n_steps", "log_every"),
    ("val_check_interval", "eval_every", "in optimizer steps"),
    ("check_val_every_n_epoch", "eval_every", "in optimizer steps"),
    ("limit_val_batches", "eval_samples", "in sequences of all ranks"),
    ("default_root_dir", "out_dir"),
    ("ckpt_path", "resume", "auto, or the path of a run or checkpoint"),
    ("fast_dev_run", "max_steps", "a few steps; --dry_run trains nothing and prints the plan"),
    ("enable_checkpointing", "checkpoint_every", "in steps; 0 is at the end only"),
    ("deterministic", "attention", _SAME_BITS),
)

RAY_TRAIN = _names(
    "Ray Train",
    ("num_workers", "workers"),
    ("use_gpu", "device", "device cuda, or mig for slices"),
    ("resources_per_worker", "cpus_per_worker", "CPUs alone; a rank has one GPU or slice"),
    ("storage_path", "out_dir"),
    ("num_to_keep", "keep_checkpoints"),
)

TORCHRUN = _names(
    "torchrun",
    (
        "nproc_per_node",
        "workers",
        "of `python -m nanoray.launch`; or torchrun --nproc-per-node before the -m",
    ),
    ("nnodes", "workers", "all ranks of all nodes; or torchrun --nnodes before the -m"),
    ("max_restarts", "max_failures"),
)

# Words that no program owns, and nested keys of files as they would be flags
COMMON = _names(
    "other programs",
    ("training.batch_size", "micro_batch_size"),
    ("training.num_epochs", "num_epochs"),
    ("training.learning_rate", "lr"),
    ("training.optimizer", "optimizer"),
    ("model.num_layers", "n_layer"),
    ("iters", "max_steps"),
    ("steps", "max_steps"),
    ("train_steps", "max_steps"),
    ("total_steps", "max_steps"),
    ("epochs", "num_epochs"),
    ("bs", "micro_batch_size", "sequences of a rank in one forward pass"),
    ("seq_len", "block_size"),
    ("seq_length", "block_size"),
    ("context_length", "block_size"),
    ("max_length", "block_size"),
    ("num_layers", "n_layer"),
    ("n_layers", "n_layer"),
    ("num_heads", "n_head"),
    ("n_heads", "n_head"),
    ("d_model", "n_embd"),
    ("n_embed", "n_embd"),
    ("embed_dim", "n_embd"),
    ("hidden_dim", "n_embd"),
    ("wd", "weight_decay"),
    ("betas", "beta1 beta2", "each in a key of its own"),
    ("eps", "", "it is 1e-8, as in torch; drop it"),
    ("clip_grad", "grad_clip"),
    ("clip_grad_norm", "grad_clip"),
    ("scheduler", "schedule"),
    ("lr_schedule", "schedule"),
    ("lr_scheduler", "schedule"),
    ("eval_freq", "eval_every"),
    ("log_freq", "log_every"),
    ("save_interval", "checkpoint_every"),
    ("save_freq", "checkpoint_every"),
    ("checkpoint_interval", "checkpoint_every"),
    ("checkpoint_dir", "out_dir"),
    ("save_dir", "out_dir"),
    ("log_dir", "out_dir"),
    ("work_dir", "out_dir"),
    ("gpus", "workers"),
    ("n_gpus", "workers"),
    ("ngpu", "workers"),
    ("world_size", "workers"),
    ("amp", "precision", "bf16 or fp16"),
    ("mixed_precision", "precision", "", FORMATS),
    ("grad_checkpointing", "activation_checkpointing", "block, or selective"),
    ("num_experts", "experts"),
    ("n_experts", "experts"),
    ("top_k_experts", "experts_per_token"),
    ("data_path", "dataset"),
    ("data", "dataset"),
    ("train_data", "dataset"),
    ("random_seed", "seed"),
    ("pretrained", "init_from", "a folder: nothing is downloaded"),
    ("pretrained_model", "init_from", "a folder: nothing is downloaded"),
    ("resume_from", "resume", "auto, or the path of a run or checkpoint"),
)

TABLE: tuple[Name, ...] = (
    *NANOGPT,
    *NANOCHAT,
    *HUGGING_FACE,
    *TORCHTITAN,
    *LIGHTNING,
    *RAY_TRAIN,
    *TORCHRUN,
    *COMMON,
)


def find(name: str) -> list[Name]:
    """Return the rows of a name. Hyphens are underscores; a section may be left out."""
    word = normalise(name)
    rows = [row for row in TABLE if row.theirs == word]
    if rows:
        return rows
    # torchtitan's keys, as they stand below their section in a file
    return [row for row in TABLE if row.theirs.rpartition(".")[2] == word and "." in row.theirs]


def translate_value(key: str, value: Any) -> str:
    """Return our word for another program's value of a key of ours; "" for an unknown one."""
    return VALUES.get(key, {}).get(str(value).lower(), "")


def normalise(name: str) -> str:
    """Return a name without the dashes before it, in lower case, with underscores."""
    return name.lstrip("-").replace("-", "_").lower()


def answer(name: str, value: Any, mark: str) -> str:
    """Return what to write in place of another program's name; "" for a name that is no program's.

    mark: what stands before a key, `--` on a command line. value: what the user gave, or None.
    """
    given = "" if value is None or isinstance(value, (dict, list)) else str(value)
    answers: dict[str, list[str]] = {}
    for row in find(name):
        answers.setdefault(_advice(row, given, mark), []).append(row.program)
    if not answers:
        return ""

    # One meaning: whose it is does not matter
    if len(answers) == 1:
        (advice,) = answers
        return advice
    return "; ".join(f"from {_listed(programs)}: {text}" for text, programs in answers.items())


def _advice(row: Name, given: str, mark: str) -> str:
    """Return what one row says: a line to write, or where to look."""
    if not row.ours:
        return row.how
    # Another value of the same key says it: `bf16` is `precision bf16`
    if row.how.startswith(f"{row.ours[0]} "):
        return f"write {mark}{row.how}"

    keys = " and ".join(f"{mark}{key}" for key in row.ours)
    value = row.value_of(given)
    if value and mark == "--":
        return f"write {keys} {value}"
    if value:
        return f"write {keys}: {value}"
    if row.how:
        return f"it is {keys} here ({row.how})"
    return f"it is {keys} here"


def _listed(programs: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(programs))
