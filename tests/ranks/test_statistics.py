"""Statistics of layers: by hand, on real ranks without a changed bit, and one warning for each
danger.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import make_config
from nanoray.lab.inspect.__main__ import main
from nanoray.models.gpt import GPT, ModelShape
from nanoray.observe.watch import dangers as told
from nanoray.observe.watch import statistics
from nanoray.observe.watch.statistics import Statistics
from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, run_ranks, series

RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "global_batch_size": 12,
    "log_every": 1,
    "dropout": 0.1,
    "eval_every": 3,
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / told.FILE).read_text().splitlines()]


def trained(text: Path, out: Path, **settings: Any) -> RunSpec:
    spec = make_spec(text, out, **RECIPE | settings)
    assert [o["exit_reason"] for o in run_ranks(spec, 2)] == ["finished"] * 2
    return spec


def test_no_bit_of_the_training_changes_and_inspect_shows_them(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(text, tmp_path / "plain")
    looked = trained(text, tmp_path / "looked", statistics_every=2)
    assert series(looked) == series(plain)
    assert series(looked, "train/loss_ema") == series(plain, "train/loss_ema")
    assert equal(final(looked), final(plain))
    assert not (plain.folder / told.FILE).exists()
    found = lines(looked.folder)
    assert [record["step"] for record in found] == [2, 4, 6]
    for record in found:
        assert {*record["layers"]} == {"tok_emb", "pos_emb", "blocks.0", "blocks.1", "norm"}
        assert {*record["layers"]["blocks.1"]} == {*told.COLUMNS}
        assert all(value > 0 for value in record["layers"]["blocks.1"].values())
        assert record["cost_ms"] > 0
    # The norm of all gradients, which the run records, is that of the layers together.
    model = GPT(ModelShape.of(looked.config, looked.dataset.vocab_size))
    counts: dict[str, int] = {}
    for name, p in model.named_parameters():
        layer = statistics.layer_of(name)
        counts[layer] = counts.get(layer, 0) + p.numel()
    for record in found:
        squares = sum(n * record["layers"][layer]["grad_rms"] ** 2 for layer, n in counts.items())
        assert math.sqrt(squares) == pytest.approx(
            series(looked, "train/grad_norm")[record["step"]], rel=1e-4
        )
    assert main([str(looked.folder)]) == 0
    shown = capsys.readouterr().out
    assert "statistics of step 6" in shown
    assert f"{found[-1]['layers']['blocks.1']['update_ratio']:.3g}" in shown


def test_an_audited_step_is_told_of_this_rank_s_own_samples(text: Path, tmp_path: Path) -> None:
    """There another rank's micro batch is computed first."""
    plain, audited = (
        lines(trained(text, tmp_path / str(every), statistics_every=2, audit_every=every).folder)
        for every in (0, 2)
    )
    assert [record["layers"] for record in audited] == [record["layers"] for record in plain]


def test_a_danger_is_told_once(text: Path, tmp_path: Path) -> None:
    """A step that is done again replaces its record, and one whose gradient is not finite has a
    null.
    """
    config, said = make_config({"micro_batch_size": 1, "statistics_every": 1}), list[str]()
    model = GPT(ModelShape(2, 2, 8, 4, True, 16))
    looker = Statistics(config, model, lambda one: 4 * one, said.append)
    assert looker.begin(tmp_path, 0) is True
    for step in (1, 2, 2, 3):
        looker.phase(step, "data")
        model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
        grad = model.pos_emb.weight.grad.clone()
        if step == 2:
            model.norm.weight.grad.fill_(math.nan)  # type: ignore[union-attr]
            model.blocks[0].norm1.weight.grad.fill_(math.inf)
        looker.phase(step, "optimizer")
        with torch.no_grad():
            model.tok_emb.weight += 1.0
        model.zero_grad()
        looker.phase(step, "log")
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]
    assert lines(tmp_path)[1]["layers"]["norm"]["grad_rms"] is None
    without_scale = lines(tmp_path)[2]["layers"]["pos_emb"]["grad_rms"]
    assert without_scale == pytest.approx(grad.square().mean().sqrt().item() / 4, rel=1e-4)
    assert [line.split(" at ")[0] for line in said] == ["warning  exploding"]
    assert not model.norm._forward_hooks
