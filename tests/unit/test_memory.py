"""The memory formula: the table of ZeRO's paper, what is in flight, and the line that --dry_run
prints.

What a rank really holds is compared with it in tests/ranks/test_bench_strategies.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from nanoray.bench.peak_memory import moments_of
from nanoray.cli.forecast.job import AssumedDevice, assume_device
from nanoray.cli.forecast.memory import (
    RankSizes,
    Sizes,
    state_memory,
)
from nanoray.cli.forecast.rank_memory import (
    largest_rank,
    memory_line,
    rank_memory,
    rank_sizes,
)
from nanoray.config import Batch, Config, make_config
from nanoray.config.layout import Layout
from nanoray.models.build import build_model
from nanoray.models.costs import count_parameters
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import weight_type
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import cut

SHAPE = ModelShape(n_layer=4, n_head=4, n_embd=64, block_size=32, bias=False, vocab_size=128)


def sizes() -> Sizes:
    with torch.device("meta"):
        return Sizes.of(GPT(SHAPE))


def memory(
    ranks: int = 4, accum: int = 1, bucket_mb: float = 0.01, **settings: Any
) -> dict[str, int]:
    return state_memory(
        make_config({"micro_batch_size": 1, **settings}), sizes(), ranks, accum, bucket_mb
    )


def test_sizes_of_a_gpt() -> None:
    found = sizes()
    assert found.params == count_parameters(SHAPE)
    assert found.layer == 12 * 64**2 + 2 * 64
    assert found.outside == found.params - 4 * found.layer == (128 + 32 + 1) * 64
    assert found.tensor == 4 * 64**2


@pytest.mark.parametrize(
    ("mode", "weights", "gradients", "moments"),
    [
        ("ddp", 4, 4, 8),
        ("ddp_by_hand", 4, 4, 8),
        ("zero1", 4, 4, 2),
        ("zero2", 4, 1, 2),
        ("fsdp", 1, 1, 2),
    ],
)
def test_bytes_per_parameter_at_four_ranks(
    mode: str, weights: int, gradients: int, moments: int
) -> None:
    found, P = memory(dp_mode=mode), sizes().params
    per_parameter = [found[part] / P for part in ("parameters", "gradients", "optimizer")]
    assert per_parameter == pytest.approx([weights, gradients, moments], rel=1e-4)
    assert memory(dp_mode=mode, optimizer="sgd")["optimizer"] == 0
    alone = memory(ranks=1, dp_mode=mode)
    assert [alone[part] for part in alone] == [4 * P, 4 * P, 8 * P, 0], "one rank shares nothing"


def test_what_is_in_flight_during_backward() -> None:
    P = 4 * sizes().params
    half = P / 2 / 2**20

    def found(mode: str, bucket_mb: float = half) -> list[tuple[float, int]]:
        config = make_config({"micro_batch_size": 1, "dp_mode": mode})
        most = memory(dp_mode=mode, bucket_mb=bucket_mb)["in_flight"]
        return moments_of(config, sizes(), bucket_mb, most, layers=4)

    assert found("ddp") == [(0.25, 0), (1.0, 0)]
    assert found("zero1") == [(0.0, 0), (0.5, P // 2), (1.0, P)]
    assert found("zero2") == [(0.0, P // 2), (0.5, P + P // 2), (1.0, 2 * P)], (
        "the next bucket is made at once"
    )
    fifths = [at for _, at in found("zero1", half * 2 / 5)]
    assert fifths[:3] == pytest.approx([0, P / 5, 2 * P / 5], abs=1)
    assert max(fifths) <= 2 * P / 5 + 1, "two buckets at most"


def test_dry_run_tells_the_memory_of_a_rank_by_part() -> None:
    def parts(**settings: Any) -> dict[str, float]:
        config = make_config(
            {"micro_batch_size": 8, "precision": "fp32", "device": "cpu"} | settings
        )
        shape = ModelShape.of(config, SHAPE.vocab_size)
        batch = Batch(8, 1, 4)
        layout = Layout.of(config, 4 * config.replica_ranks)
        memory = rank_memory(config, shape, layout, batch, assume_device(config))
        line = memory_line(config, batch, "fp32", memory)
        found = {
            name: float(size)
            for name, size in re.findall(r"([a-z ]+?) ([\d.]+)(?: \+|$)", line.partition(": ")[2])
        }
        total = float(re.search(r"memory +([\d.]+) MiB per rank", line)[1])  # type: ignore[index]
        assert total == pytest.approx(sum(found.values()), abs=0.3)
        return {name.strip("+ "): size for name, size in found.items()}

    ddp, fsdp = parts(dp_mode="ddp"), parts(dp_mode="fsdp", mirror="off")
    assert set(ddp) == {"parameters", "gradients", "optimizer", "activations", "logits"}
    assert set(fsdp) == {*ddp, "in flight"}
    assert fsdp["optimizer"] == pytest.approx(ddp["optimizer"] / 4, abs=0.1)
    assert fsdp["activations"] == ddp["activations"]
    mirror = parts(dp_mode="fsdp")["mirror"]
    assert mirror == pytest.approx(
        fsdp["parameters"] + fsdp["gradients"] + fsdp["optimizer"], abs=0.1
    )
    assert parts(activation_checkpointing="block")["activations"] < 0.5 * ddp["activations"]


def test_what_a_dry_run_assumes_of_devices() -> None:
    def assumed(gpus: bool, **settings: Any) -> AssumedDevice:
        return assume_device(make_config({"micro_batch_size": 1, **settings}), gpus)

    cpu, gpu = AssumedDevice("cpu", "fp32", 8.0, True), AssumedDevice("cuda", "bf16", 25.0, False)
    assert assumed(False, dp_mode="zero1") == assumed(True, dp_mode="zero1", device="cpu") == cpu
    assert assumed(True, dp_mode="zero1") == assumed(False, dp_mode="zero1", device="cuda") == gpu
    assert assumed(True, precision="fp32", bucket_mb=4.0) == AssumedDevice(
        "cuda", "fp32", 4.0, False
    )


def rank_model(config: Config, stage: int) -> nn.Module:
    """Return the model of the first rank of a stage on the meta device, as a run cuts it."""

    def axis(name: str, index: int = 0) -> Axis:
        size = getattr(config, name)
        mesh = Mesh(index, size, 0, torch.device("meta"), "none", "no other rank")
        return Axis(name, tuple(range(size)), index, None, mesh)

    axes = {"tp": axis("tp"), "cp": axis("cp"), "pp": axis("pp", stage), "ep": axis("ep")}
    with torch.device("meta"):
        model = build_model(config, 256).to(weight_type(config.precision))
        cut(model, axes, config, mirror=0)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "pp": 2, "dp_mode": "ddp_by_hand"},
        {"pp": 4, "dp_mode": "zero1"},
        {"bias": True, "positions": "rotary", "tp": 4},
        {"experts": 4, "ep": 2, "dp_mode": "zero1"},
        {"experts": 4, "ep": 2, "tp": 2, "pp": 2, "dp_mode": "zero2"},
        {"precision": "fp16_pure", "master_weights": "fp32"},
    ],
    ids=str,
)
def test_formulas_count_the_parameters_of_a_model_that_is_cut(settings: dict[str, Any]) -> None:
    values = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 32, "micro_batch_size": 1}
    config = make_config(values | settings)
    shape = ModelShape.of(config, 256)
    layout = Layout.of(config, 8)
    for stage in range(layout.pp):
        model = rank_model(config, stage)
        counted = RankSizes.of(config, model)
        formula = rank_sizes(config, shape, layout, stage)
        if layout.ep == 1:
            assert formula == counted
            continue
        # Of experts and the rest only these are counted.
        for one, other in ((formula.dense, counted.dense), (formula.experts, counted.experts)):
            assert one is not None
            assert other is not None
            found = (one.params, one.tensor, one.trained)
            assert found == (other.params, other.tensor, other.trained)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_no_stage_needs_more_than_the_one_of_a_dry_run(schedule: str) -> None:
    values = {"n_layer": 8, "n_head": 4, "n_embd": 64, "block_size": 32, "micro_batch_size": 1}
    config = make_config(values | {"pp": 4, "pp_schedule": schedule, "dp_mode": "ddp_by_hand"})
    batch = Batch(1, 8, 1)
    device, layout = assume_device(config, gpus=False), Layout.of(config, 4)
    # With a small vocabulary one of the first stages needs most, with a large one the last.
    for vocabulary in (64, 4096):
        shape = ModelShape.of(config, vocabulary)
        totals = [
            sum(rank_memory(config, shape, layout, batch, device, stage).values())
            for stage in range(4)
        ]
        stage, parts = largest_rank(config, shape, layout, batch, device)
        assert sum(parts.values()) == max(totals)
    line = memory_line(config, batch, "fp32", parts, stage)
    assert line.startswith("memory     stage 3, which needs most: ")
