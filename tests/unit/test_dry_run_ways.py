"""`--dry_run` with --workers N and with --world_size N: the same answers.

Both have the parameters of a rank from formulas, which are compared with a model that is cut.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from nanoray.cli import Loaded, Scale
from nanoray.config import Config, make_config, resolve_batch
from nanoray.forecast import scale
from nanoray.forecast.dry_run import dry_run_lines
from nanoray.forecast.memory import RankSizes
from nanoray.forecast.owners import rank_model
from nanoray.forecast.rank_memory import rank_sizes
from nanoray.forecast.scale import known_dataset
from nanoray.mesh.layout import Coords, Layout
from nanoray.models.gpt import ModelShape
from nanoray.models.precision import weight_type
from nanoray.start.plan import forecast_at, plan

RANKS = 8
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 32, "tokenizer": "byte"}
KEYS = ("batch ", "model ", "pipeline ", "memory ", "links ")


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "prepare", lambda config: pytest.fail("it read a data set"))


def both_ways(ranks: int = RANKS, **settings: Any) -> tuple[list[str], list[str]]:
    """Return the key lines of --workers N and of --world_size N."""
    values = {"micro_batch_size": 2, "global_batch_size": 64, "dataset": "stdlib", "device": "cpu"}
    config = make_config(SHAPE | values | settings)
    loaded = Loaded(config, frozenset(), True)

    dataset = known_dataset(config)
    planned = plan(loaded, ranks, dataset)
    require_counted_sizes(planned.config, Layout.of(planned.config, ranks), dataset.vocab_size)
    batch = resolve_batch(planned.config, Layout.of(planned.config, ranks).dp)
    workers = dry_run_lines(planned.config, planned.notes, batch, dataset, "here")
    world_size = forecast_at(loaded, Scale(ranks))
    return key_lines(workers), key_lines(world_size)


def require_counted_sizes(config: Config, layout: Layout, vocab_size: int) -> None:
    """Compare the formulas with a model that is cut on the meta device, for each stage."""
    shape = ModelShape.of(config, vocab_size)
    dtype = weight_type(config.precision)
    for stage in range(layout.pp):
        model = rank_model(config, vocab_size, dtype, Coords(pp=stage))
        counted = RankSizes.of(config, model)
        formula = rank_sizes(config, shape, layout, stage)
        if layout.ep == 1:
            assert formula == counted
            continue
        # Of experts and the rest only these are counted
        for one, other in ((formula.dense, counted.dense), (formula.experts, counted.experts)):
            assert one is not None
            assert other is not None
            assert (one.params, one.tensor, one.trained) == (
                other.params,
                other.tensor,
                other.trained,
            )


@pytest.mark.parametrize(("precision", "masters"), [("bf16_pure", "none"), ("fp16_pure", "fp32")])
@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_weights_of_16_bits_have_the_sizes_of_their_model(
    precision: str, masters: str, mode: str
) -> None:
    keys = {"precision": precision, "master_weights": masters, "dp_mode": mode}
    config = make_config(SHAPE | {"micro_batch_size": 2} | keys)
    require_counted_sizes(config, Layout(dp=4), 256)


def key_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(KEYS)]


def figures(line: str) -> dict[str, float]:
    """Return the bytes by part of a line on memory, in MiB."""
    parts = line.rpartition(": ")[2]
    return {
        name: float(size.replace(",", ""))
        for name, size in re.findall(r"([a-z][a-z ]*?) ([\d.,]+)(?: \+|$)", parts)
    }


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mode", ["ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"])
def test_both_ways_give_the_same_figures(mode: str, tp: int, pp: int) -> None:
    if tp * pp > RANKS:
        pytest.skip("more axes than ranks")
    if pp > 1 and mode == "fsdp":
        pytest.skip("fsdp has no pipeline")
    if mode == "ddp" and 1 < pp < RANKS // tp:
        pytest.skip("torch's DDP has no pipeline")
    workers, world_size = both_ways(dp_mode=mode, tp=tp, pp=pp)
    assert workers == world_size

    # Not equal because they are empty: a line for each stage, each with the state of a rank.
    memory = [line for line in workers if line.startswith("memory ")]
    assert len(memory) == pp
    for line in memory:
        parts = figures(line)
        assert min(parts["parameters"], parts["gradients"], parts["activations"]) > 0
        total = re.search(r"([\d.,]+) MiB per rank", line)
        assert total
        assert float(total[1]) == pytest.approx(sum(parts.values()), abs=0.05 * (len(parts) + 1))


def test_both_say_what_groups_of_replicas_send() -> None:
    settings: dict[str, Any] = {"dp_mode": "zero1", "replicas": 2, "bucket_mb": 0.05}
    workers, world_size = both_ways(**settings)
    assert workers == world_size
    (line,) = [line for line in workers if line.startswith("links ")]
    assert "between nodes a step (nodes of 4, a group each); without replicas" in line
    assert "MiB per rank, zero1 in 2 groups at fp32" in "\n".join(workers)
    alone, _ = both_ways(dp_mode="zero1")
    assert not [line for line in alone if line.startswith("links ")]
