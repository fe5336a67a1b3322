"""The registry of all metrics: name, unit, meaning, healthy range. Others cannot be recorded.

`python -m nanoray.machine.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One metric.

    metrics.jsonl and TensorBoard use `name` as it is; Ray's metrics have _ in place of /.
    """

    name: str
    unit: str
    meaning: str
    healthy: str


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        # Training: what the loss, the learning rate and the loss scale do.
        Metric(
            "train/loss",
            "nat/token",
            "cross entropy of this step's global batch: mean over all ranks and micro steps, "
            "before the update; for image models per image, with smoothed labels",
            "starts near ln(vocabulary size, or classes), falls; equal on all ranks",
        ),
        Metric(
            "train/loss_ema",
            "nat/token",
            "train/loss smoothed: exponential moving average with decay 0.99 per step; a resumed "
            "run continues it",
            "falls without the noise of train/loss",
        ),
        Metric(
            "train/lr", "1", "learning rate that this step's update used", "follows the schedule"
        ),
        Metric(
            "train/grad_norm",
            "1",
            "global L2 norm of the averaged gradient, unscaled, before clipping",
            "0.1 to 2 after warm-up; spikes mean bad batches or a learning rate that is too high",
        ),
        Metric(
            "train/tokens",
            "token",
            "tokens trained on so far: samples_seen x block_size",
            "grows linearly",
        ),
        Metric(
            "train/samples", "image", "image models: images trained on so far", "grows linearly"
        ),
        Metric(
            "train/loss_scale",
            "1",
            "fp16 only: factor on the loss before backward",
            "2^10 to 2^20; below 1 the run stops",
        ),
        Metric(
            "train/skipped_steps",
            "step",
            "fp16 only: steps whose update was skipped on every rank because a gradient overflowed",
            "a handful at the start, then one per growth interval",
        ),
        Metric(
            "train/good_steps",
            "step",
            "fp16 only: steps without an overflow since the loss scale last changed; after 1000 "
            "it doubles, up to its cap of 2^24",
            "rises to 1000 and begins anew; always small: the scale does not recover",
        ),
        # Validation: over the same samples at every number of ranks.
        Metric(
            "val/loss",
            "nat/token",
            "cross entropy over eval_samples windows of the validation split, all ranks together",
            "close to train/loss; rising while train/loss falls means overfitting",
        ),
        Metric(
            "val/accuracy",
            "1",
            "image models: share of the same validation images whose class has the highest logit",
            "rises; 1 / classes is chance",
        ),
        # Time, and what is done in it.
        Metric(
            "time/step_ms",
            "ms",
            "wall time per optimizer step: mean since the last record, without evaluation and "
            "checkpoints",
            "steady; the first step is not in it",
        ),
        Metric(
            "time/train_s",
            "s",
            "training time so far: the sum of all timed steps, without start-up, evaluation and "
            "checkpoints; a resumed run continues it",
            "grows linearly",
        ),
        Metric(
            "time/data_ms",
            "ms",
            "of step_ms: host time spent on fetching batches",
            "under 2 % of step_ms",
        ),
        Metric(
            "time/eval_s", "s", "wall time of this evaluation", "small against eval_every steps"
        ),
        Metric(
            "time/checkpoint_s",
            "s",
            "wall time of the newest checkpoint before this record, during which training waited",
            "small against checkpoint_every steps",
        ),
        Metric(
            "time/checkpoint_write_s",
            "s",
            "wall time of writing the newest checkpoint on disk; with checkpoint_mode async "
            "training went on meanwhile",
            "below the time of checkpoint_every steps, else checkpoints wait for each other",
        ),
        Metric(
            "perf/tok_per_sec",
            "token/s",
            "tokens per second of all ranks: global batch x block_size / step_ms",
            "steady",
        ),
        Metric(
            "perf/samples_per_sec",
            "image/s",
            "image models: images per second of all ranks: global batch / step_ms",
            "steady",
        ),
        Metric(
            "perf/mfu",
            "%",
            "model FLOPs utilisation: tok_per_sec x flops_per_token / (ranks x peak FLOP/s of the "
            "device or slice); flops_per_token = 6 x parameters without positions + 12 x L x H x "
            "Q x T. Only with a known peak",
            "30 to 55 on large GPUs",
        ),
        # Faults: each of these stays 0 in a run without any.
        Metric(
            "fault/restarts",
            "1",
            "groups of ranks formed after the first: with replacements, fewer or more ranks, or "
            "from a checkpoint; this is the number of the attempt, counted from 0",
            "0",
        ),
        Metric(
            "fault/skipped_steps",
            "step",
            "with on_nan skip: updates left out in this run because the loss or the gradient norm "
            "was not finite",
            "0",
        ),
        Metric(
            "fault/rollbacks",
            "1",
            "with on_nan rollback: how often this run went back to a checkpoint and continued "
            "with later data",
            "0",
        ),
        Metric(
            "fault/healed",
            "1",
            "ranks of this run whose weights or optimizer state differed and were replaced by the "
            "majority's",
            "0; more than one on the same rank means a faulty device",
        ),
        Metric(
            "fault/grad_spikes",
            "step",
            "steps of this run whose gradient norm was above 10 times its median over the last "
            "100 (on a GPU: of the logged ones)",
            "0",
        ),
        # Mixture of experts: whether the router spreads tokens evenly.
        Metric(
            "moe/load_max",
            "1",
            "mixture of experts: choices that fell on the most loaded expert, over the mean of "
            "the experts, in this step's global batch; of the layer where that is largest; "
            "`expert_load` has all of them",
            "1 is even; below 2 after the first hundreds of steps; the number of experts / top k: "
            "one gets everything",
        ),
        Metric(
            "moe/load_min",
            "1",
            "the same of the least loaded expert, in the layer where that is smallest",
            "0.5 to 1; 0: an expert that no token reaches learns nothing",
        ),
        Metric(
            "moe/entropy",
            "1",
            "entropy of a token's probabilities over the experts, as a share of log(experts); "
            "mean of all",
            "starts near 1, falls as the router decides; near 0 with a load_max that grows: it "
            "has collapsed",
        ),
        Metric(
            "moe/balance_loss",
            "1",
            "the loss that evens the load, without its factor; mean of layers",
            "near 1",
        ),
        Metric(
            "moe/z_loss",
            "1",
            "mean square of log(sum of exp(router's logits)); mean of layers",
            "below 20",
        ),
        # Communication and pipelines, in traced steps.
        Metric(
            "comm/step_ms",
            "ms",
            "traced steps only, as all comm/ metrics: mean wall time of the steps traced since "
            "the last record",
            "close to time/step_ms",
        ),
        Metric(
            "pipe/bubble",
            "%",
            "with pp, traced steps only: share of forward and backward in which a stage waits for "
            "another one, as measured, mean over ranks",
            "close to pipe/bubble_theory; above it where stages take unequal time",
        ),
        Metric(
            "pipe/bubble_theory",
            "%",
            "the same by the schedule alone: (pp - 1) / (chunks x micro batches + pp - 1), if all "
            "passes of a kind take equally long and messages take no time",
            "more micro batches or chunks lower it",
        ),
        Metric(
            "comm/busy_ms",
            "ms",
            "time of a step in which at least one collective was running: exposed + hidden, mean "
            "over ranks",
            "fewer and larger buckets lower it",
        ),
        Metric(
            "comm/exposed_ms",
            "ms",
            "time of a step in which a collective ran and no compute did: from the moment the "
            "last gradient bucket was ready to the end of its all-reduce, plus blocking "
            "collectives",
            "small against step_ms",
        ),
        Metric("comm/exposed_share", "%", "100 x exposed_ms / comm/step_ms", "under 10"),
        Metric(
            "comm/busbw_gbps",
            "GB/s",
            "bus bandwidth of the gradients' all-reduces as nccl-tests defines it: bytes x "
            "2(n-1)/n / time, where the time starts when the last rank has begun",
            "near the link's limit for buckets of 25 MB",
        ),
        Metric(
            "comm/skew_ms",
            "ms",
            "last rank's arrival at a gradient bucket minus the first rank's, mean over buckets",
            "small against busy_ms",
        ),
        Metric(
            "comm/late_rank",
            "rank",
            "the rank with the most work of its own in most traced steps",
            "changes",
        ),
        Metric(
            "comm/late_ms",
            "ms",
            "that rank's own work of a step (data, forward, backward to its last bucket, "
            "optimizer) minus the median of the others'",
            "under 20 % of the step; above that, the log names the rank and its phase as a "
            "straggler",
        ),
        # Memory and disk.
        Metric(
            "mem/peak_gib",
            "GiB",
            "rank 0: peak memory of PyTorch's CUDA allocator; on CPU the peak resident set",
            "flat",
        ),
        Metric(
            "mem/rss_gib",
            "GiB",
            "`nanoray run`: resident memory of a rank's processes, of the rank that has most",
            "flat",
        ),
        Metric(
            "gpu/mem_gib",
            "GiB",
            "`nanoray run`: memory in use on a rank's GPU or slice, by all processes; of the "
            "fullest",
            "flat, below the GPU's",
        ),
        Metric(
            "gpu/load",
            "%",
            "`nanoray run`: share of the time in which a kernel ran on a rank's GPU, as NVML "
            "samples it; of the most loaded. A slice has none",
            "near 100",
        ),
        Metric(
            "disk/used",
            "%",
            "share of the file system of the run's folder that is in use, as rank 0 sees it",
            "below 90: checkpoints are left out when it is full",
        ),
    )
}


# What a record contains beside metrics
RECORD_KEYS = ("step", "attempt", "time", "expert_load", "ranks")


def values_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record, and the values that a script has logged."""
    return {name: value for name, value in record.items() if name not in RECORD_KEYS}


def check_record(record: dict[str, Any]) -> None:
    """Assert that every metric of `record` is registered."""
    unknown = [key for key in record if key not in METRICS and key not in RECORD_KEYS]
    assert not unknown, f"metrics without an entry in METRICS: {unknown}"


def mfu_percent(tok_per_sec: float, flops_per_token: float, peak_flops: float) -> float:
    """Return model FLOPs utilisation in percent (PaLM, Chowdhery et al. 2022, appendix B)."""
    return 100.0 * tok_per_sec * flops_per_token / peak_flops


def algbw_gbps(size_bytes: float, seconds: float) -> float:
    """Return S / t in 1e9 bytes/s, the throughput of the caller (nccl-tests, PERFORMANCE.md)."""
    return size_bytes / seconds / 1e9


def busbw_factor(op: str, ranks: int) -> float | None:
    """Return busbw / algbw; None for one rank.

    It counts how often each byte crosses the slowest link of the best algorithm. S is the total
    size: for reduce_scatter, all_gather and all_to_all, n times a rank's share. Source: as above.
    """
    if ranks < 2:
        return None
    share = (ranks - 1) / ranks
    if op == "all_reduce":
        return 2 * share
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return share
    return 1.0


def to_markdown() -> str:
    """Return docs/metrics.md."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.healthy} |" for m in METRICS.values()]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Generated by `make docs`. `metrics.jsonl` in a run's folder holds "
            "one record per logged",
            "step with these keys, `step`, `attempt` (restarts so far) and `time` (Unix seconds); "
            "floats have full",
            "precision. TensorBoard shows the same names. Ray exports them as "
            "`ray_nanoray_train_loss` and so on, with",
            "the tags `run` and `rank`, as long as the run trains ([alerts](reports.md#alerts)). A script adds values "
            "of its own with",
            "`run.log` ([callbacks](python.md#callbacks)).",
            "",
            "| name | unit | meaning | healthy |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


if __name__ == "__main__":
    print(to_markdown())
