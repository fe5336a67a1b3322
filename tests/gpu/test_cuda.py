"""The promises of the CPU tests, on a GPU: equal bits after a resume, equal modes, no skipped
fault, no wait.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.bench.harness.rank_pool import RankPool
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.config import load_config
from nanoray.models.precision import LossScaler
from nanoray.parallel import cp_blocks
from tests.gpu.conftest import backend
from tests.harness import commands
from tests.stress.equivalence import ADAMW, ENTRY, MODES, SGD

DEVICE = torch.device("cuda", 0)


def started(recipe: list[str], out: Path, *flags: str, ranks: int = 1) -> tuple[set[int], str]:
    """Train under torchrun's variables; return the ranks' exit codes and what they wrote."""
    command = ["nanoray.train", *recipe, "--out_dir", str(out), *flags]
    ended = [commands.run(*command)] if ranks == 1 else commands.torchrun(ranks, *command)
    return {each.returncode for each in ended}, "\n".join(
        each.stdout + each.stderr for each in ended
    )


def train(recipe: list[str], out: Path, *flags: str, ranks: int = 1) -> Path:
    """Train to the end; return the folder of the newest run."""
    codes, told = started(recipe, out, *flags, ranks=ranks)
    assert codes == {0}, told
    return max(out.iterdir(), key=lambda run: run.stat().st_mtime)


def final(run: Path) -> StateDict:
    found, damaged = newest_valid(run / "checkpoints")
    assert found, run
    assert not damaged
    return found.state


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_equal(a: StateDict, b: StateDict) -> None:
    assert a.model.keys() == b.model.keys()
    assert a.optimizer.keys() == b.optimizer.keys()
    for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


# The less usual come first: `make bench-gpu` has time for some of them only.
RESUMED = [
    ("bf16", ("--compile", "cuda_graphs", "--grad_accum_steps", "2")),
    ("fp8", ()),
    ("tf32", ()),
    ("fp8", ("--fp8_scaling", "row")),
    ("bf16_pure", ("--rounding", "stochastic")),
    ("bf16_pure", ("--master_weights", "fp32")),
    ("fp16_pure", ("--master_weights", "fp32")),
    ("bf16", ("--compile", "true")),
    ("fp32", ()),
    ("bf16", ()),
    ("fp16", ()),
    ("bf16", ("--activation_checkpointing", "block")),
]


@pytest.mark.parametrize(("precision", "flags"), RESUMED)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    gpu_recipe: list[str], tmp_path: Path, precision: str, flags: tuple[str, ...]
) -> None:
    flags += ("--precision", precision, "--checkpoint_every", "6")
    whole = train(gpu_recipe, tmp_path / "whole", *flags)
    half = train(gpu_recipe, tmp_path / "halves", *flags, "--stop_at", "6")
    both = train(gpu_recipe, tmp_path / "halves", *flags, "--resume", str(half))
    assert_equal(final(whole), final(both))
    first, last = records(whole)[0], records(whole)[-1]
    assert last["train/loss"] < first["train/loss"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("--compile", "true"), ("--compile", "cuda_graphs")),
        (("--attention", "flash"), ("--attention", "cudnn")),
    ],
    ids=["CUDA graphs", "cuDNN"],
)
def test_other_ways_to_launch_and_to_attend_learn_the_same(
    gpu_recipe: list[str], tmp_path: Path, one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    flags = ("--precision", "bf16", "--dropout", "0", "--eval_every", "6")
    losses = []
    for way in (one, other):
        run = train(gpu_recipe, tmp_path / way[1], *flags, *way)
        losses.append([record["train/loss"] for record in records(run)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


# Lets torch take `most` GiB of the GPU from step 4 on.
TAKEN_AWAY = """
import sys, torch
from nanoray.train.engine import Engine
from nanoray.train.__main__ import main
is_logged = Engine.is_logged
def with_less_memory(engine, step, last):
    if step == 4:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction({most} * 2**30 / total)
    return is_logged(engine, step, last)
Engine.is_logged = with_less_memory
sys.exit(main(sys.argv[1:]))"""


def test_a_step_that_runs_out_of_memory_is_done_again(
    gpu_recipe: list[str], tmp_path: Path
) -> None:
    """The memory that is left holds half of the micro batch, or a quarter."""
    flags = ("--precision", "fp32", "--dropout", "0", "--max_steps", "8", "--checkpoint_every", "0")
    flags = (*flags, "--global_batch_size", "1024", "--micro_batch_size", "1024")
    whole = train(gpu_recipe, tmp_path / "whole", *flags)
    most = 0.7 * records(whole)[-1]["mem/peak_gib"]
    script = tmp_path / "taken_away.py"
    script.write_text(TAKEN_AWAY.format(most=most))
    out = tmp_path / "less"
    done = commands.run(str(script), *gpu_recipe, *flags, "--out_dir", str(out))
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "ran out of memory" in told
    assert "micro batch 1024 -> 512, accumulation 1 -> 2" in told
    less = records(next(out.iterdir()))
    assert [record["step"] for record in less] == [*range(1, 9)]
    losses = [record["train/loss"] for record in records(whole)]
    assert [record["train/loss"] for record in less] == pytest.approx(losses, abs=1e-4)


def test_the_fastest_micro_batch_that_fits(gpu_recipe: list[str], tmp_path: Path) -> None:
    """It divides the batch, and a run that is given it has the losses of the whole one."""
    flags = ("--precision", "fp32", "--dropout", "0", "--max_steps", "8", "--checkpoint_every", "0")
    flags = (*flags, "--global_batch_size", "1024", "--data_dir", str(tmp_path / "data"))
    tuned = tmp_path / "tuned.yaml"
    search = ("--micro_batch_size", "auto", "--budget_s", "60", "--write", str(tuned))
    out = ("--workers", "1", "--out_dir", str(tmp_path / "search"))
    done = commands.run("nanoray.lab.tune", *gpu_recipe, *flags, *search, *out)
    assert done.returncode == 0, done.stdout + done.stderr
    micro = load_config(str(tuned)).micro_batch_size
    assert 1024 % micro == 0
    losses = []
    for size in ("1024", str(micro)):
        trained = train(gpu_recipe, tmp_path / size, *flags, "--micro_batch_size", size)
        losses.append([record["train/loss"] for record in records(trained)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "fsdp"])
def test_two_ranks_resume_with_equal_bits(gpu_recipe: list[str], tmp_path: Path, mode: str) -> None:
    flags = ("--dp_mode", mode, "--checkpoint_every", "6", "--backend", backend("nccl"))
    whole = train(gpu_recipe, tmp_path / "whole", *flags, ranks=2)
    half = train(gpu_recipe, tmp_path / "halves", *flags, "--stop_at", "6", ranks=2)
    both = train(gpu_recipe, tmp_path / "halves", *flags, "--resume", str(half), ranks=2)
    assert_equal(final(whole), final(both))


def test_every_mode_trains_as_one_process_does(pair: RankPool) -> None:
    for accum in (1, 2):
        for settings, most in ((SGD, 2e-5), (ADAMW, 1e-3)):
            order = {
                "arms": MODES,
                "cases": [{"accum": accum, "settings": settings}],
                "alone": True,
            }
            for each in pair.run(ENTRY, order):
                for rank in each["ranks"]:
                    assert rank["off"] < most, (each["arm"], accum)
                    assert rank["losses"] == pytest.approx(rank["alone"]["losses"], abs=2e-5), each[
                        "arm"
                    ]
                    assert rank["norms"] == pytest.approx(rank["alone"]["norms"], rel=1e-3), each[
                        "arm"
                    ]


def test_modes_by_hand_agree_bit_for_bit(pair: RankPool) -> None:
    arms = {mode: {"dp_mode": mode} for mode in ("ddp_by_hand", "zero1", "zero2")}
    order = {"arms": arms, "cases": [{"accum": 1, "settings": ADAMW}], "alone": False}
    found = [*pair.run(ENTRY, order)]
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_an_overflow_skips_the_fused_update_and_nobody_waits() -> None:
    """The host learns of the skip later: neither `look` nor `step` may synchronise with the device."""
    scaler = LossScaler(DEVICE, enabled=True)
    weight = torch.ones(1000, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    loss = torch.zeros((), device=DEVICE)
    for gradient in (torch.ones_like(weight), torch.full_like(weight, torch.inf)):
        weight.grad = gradient
        # The state exists before the steps that must not wait
        optimizer.step() if not optimizer.state else None
        before = weight.detach().clone()
        norm = gradient.norm()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.flag_nonfinite(norm, loss)
            scaler.step([optimizer])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        skips = bool(torch.isinf(gradient).any())
        assert torch.equal(weight.detach(), before) == skips
    assert scaler.read(2) == (LossScaler.INITIAL / 2, 1, 0)


def test_a_planted_nan_is_skipped_on_both_ranks(gpu_recipe: list[str], tmp_path: Path) -> None:
    flags = (
        "--on_nan",
        "skip",
        "--faults",
        "nan@rank=1,step=5",
        "--hash_every",
        "1",
        "--checkpoint_every",
        "12",
    )
    run = train(gpu_recipe, tmp_path, *flags, "--backend", backend("nccl"), ranks=2)
    assert all(torch.isfinite(tensor).all() for tensor in final(run).model.values())
    assert records(run)[-1]["fault/skipped_steps"] == 1


def test_a_flipped_bit_is_seen(gpu_recipe: list[str], tmp_path: Path) -> None:
    flags = ("--faults", "bitflip@rank=1,step=5", "--hash_every", "6", "--backend", backend("nccl"))
    codes, told = started(gpu_recipe, tmp_path, *flags, ranks=2)
    assert 0 not in codes
    assert "after step 6 the ranks hold different weights" in told


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
def test_a_hand_written_all_reduce_trains_on_the_gpu(
    gpu_recipe: list[str], tmp_path: Path, algorithm: str
) -> None:
    flags = ("--backend", backend("nccl"), "--precision", "fp32", "--dropout", "0")
    plain = train(gpu_recipe, tmp_path / "plain", *flags, ranks=2)
    ours = train(gpu_recipe, tmp_path / "ours", *flags, "--allreduce", algorithm, ranks=2)
    assert records(ours)[-1]["train/loss"] == pytest.approx(
        records(plain)[-1]["train/loss"], abs=1e-4
    )


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp"])
def test_a_trace_measures_nccl_and_changes_no_bit(
    gpu_recipe: list[str], tmp_path: Path, mode: str
) -> None:
    flags = ("--backend", backend("nccl"), "--dp_mode", mode, "--checkpoint_every", "12")
    plain = train(gpu_recipe, tmp_path / "plain", *flags, ranks=2)
    traced = train(gpu_recipe, tmp_path / "traced", *flags, "--comm_trace", "every=3", ranks=2)
    assert_equal(final(plain), final(traced))
    measured = [record for record in records(traced) if "comm/busy_ms" in record]
    assert measured
    assert all(
        0 <= record["comm/exposed_ms"] <= record["comm/busy_ms"] * 1.01 for record in measured
    )
    assert (traced / "comm" / "steps.jsonl").is_file()


def test_a_checkpoint_of_a_gpu_goes_on_on_a_cpu(gpu_recipe: list[str], tmp_path: Path) -> None:
    half = train(
        gpu_recipe, tmp_path, "--stop_at", "6", "--checkpoint_every", "6", "--precision", "fp32"
    )
    on_cpu = [flag if flag != "cuda" else "cpu" for flag in gpu_recipe]
    both = train(
        on_cpu, tmp_path, "--checkpoint_every", "6", "--precision", "fp32", "--resume", str(half)
    )
    assert final(both).meta["step"] == 12
    told = commands.run(
        "nanoray", "sample", str(both), "--device", "cuda", "--max_new_tokens", "20"
    )
    assert told.returncode == 0, told.stderr


def test_a_step_in_steady_state_leaves_no_memory_behind(
    gpu_recipe: list[str], tmp_path: Path
) -> None:
    """Peak memory of a longer run is that of a shorter one."""
    peaks = [
        records(train(gpu_recipe, tmp_path / steps, "--max_steps", steps, "--precision", "bf16"))[
            -1
        ]["mem/peak_gib"]
        for steps in ("12", "48")
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(48, 48, True), (24, 48, False)])
def test_a_block_of_keys_is_the_same_by_the_fused_kernel(
    dtype: torch.dtype, queries: int, keys: int, causal: bool
) -> None:
    """Of context parallelism: results, sums, and gradients, beside plain products in float64."""
    source = torch.Generator("cuda").manual_seed(1)
    sizes = {"q": queries, "k": keys, "v": keys, "grad": queries}
    made = {}
    for name, size in sizes.items():
        made[name] = torch.randn(2, 3, size, 64, generator=source, device="cuda", dtype=dtype)

    def block(kernel: str, **given: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = given["q"], given["k"], given["v"]
        y, sums = cp_blocks.forward(q, k, v, causal, kernel)
        result = y.to(q.dtype)
        gradients = cp_blocks.backward(given["grad"], q, k, v, result, sums, causal, kernel)
        return [y, sums, *gradients]

    exact = block("plain", **{name: tensor.double() for name, tensor in made.items()})
    far = 2e-3 if dtype == torch.float32 else 0.1
    for mine, its in zip(block("flash", **made), exact, strict=True):
        assert (mine.double() - its).abs().max() < far


def test_parts_of_sequences_train_as_one_process_does(pair: RankPool) -> None:
    arms = {
        "ring": {"cp": 2},
        "plain": {"cp": 2, "attention": "plain", "dp_mode": "zero1"},
    }
    case = {"accum": 2, "settings": SGD}
    found = [*pair.run(ENTRY, {"arms": arms, "cases": [case], "alone": True})]
    assert len(found) == len(arms)
    for each in found:
        for rank in each["ranks"]:
            assert rank["off"] < 1e-4, each["arm"]
            assert rank["losses"] == pytest.approx(rank["alone"]["losses"], abs=1e-4), each["arm"]
