"""A ResNet on images through the whole program: resume, modes, batch normalisation over ranks,
copies of its state.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.data.dataset import DatasetInfo
from tests.harness.axes import equal, final
from tests.harness.images import image_spec, small_dataset
from tests.harness.ranks import records, run_ranks, series
from tests.ranks.conftest import Pools


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    return small_dataset(tmp_path_factory.mktemp("images"))


def trained(images: DatasetInfo, folder: Path, world: int, **settings: Any) -> RunSpec:
    spec = image_spec(images, folder, **settings)
    outcomes = run_ranks(spec, world)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "mode"),
    [
        *(pytest.param(world, "ddp", marks=pytest.mark.full) for world in (1, 2)),
        pytest.param(2, "zero2", marks=pytest.mark.full),
        (3, "ddp"),
    ],
)
def test_resume_in_the_middle_of_an_epoch_changes_no_bit(
    images: DatasetInfo, tmp_path: Path, world: int, mode: str
) -> None:
    settings = {"dp_mode": mode, "nesterov": True, "label_smoothing": 0.1, "hash_every": 1}
    whole = trained(images, tmp_path / "whole", world, **settings)
    first = trained(images, tmp_path / "cut", world, **settings, stop_at=3)
    assert final(first).meta["samples_seen"] == 72, "of an epoch of 100"
    rest = trained(images, tmp_path / "cut", world, **settings, resume="auto")
    assert rest.folder == first.folder
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        assert series(rest, key) == series(whole, key), key
    assert equal(final(rest), final(whole))
    assert "stem_norm.running_mean" in final(whole).model
    assert "momentum_buffer.stem.weight" in final(whole).optimizer
    assert not [name for name in final(whole).model if "pending" in name]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "mode"),
    [
        pytest.param(2, "ddp", marks=pytest.mark.full),
        (3, "ddp_by_hand"),
        pytest.param(2, "zero2", marks=pytest.mark.full),
        pytest.param(2, "fsdp", marks=pytest.mark.full),
    ],
)
def test_synchronised_norms_train_as_one_process_does(
    images: DatasetInfo, tmp_path: Path, world: int, mode: str
) -> None:
    """Plain SGD without clipping shows a wrong factor. Without --sync_batchnorm the losses are
    others.
    """
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.1, "precision": "fp32"}
    alone = trained(images, tmp_path / "alone", 1, **plain)
    ours = trained(images, tmp_path / "sync", world, dp_mode=mode, sync_batchnorm=True, **plain)
    assert series(ours) == pytest.approx(series(alone), abs=2e-4)
    assert series(ours, "train/grad_norm") == pytest.approx(
        series(alone, "train/grad_norm"), rel=2e-3
    )
    for name, tensor in final(alone).model.items():
        assert torch.allclose(final(ours).model[name], tensor, atol=2e-3), name
    local = trained(images, tmp_path / "local", world, dp_mode=mode, **plain)
    assert series(local) != pytest.approx(series(alone), abs=2e-4), (
        "each rank normalises by its own images"
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("synchronised", [True, False])
def test_a_synchronised_layer_is_torchs_over_the_whole_batch(
    pools: Pools, ranks: int, synchronised: bool
) -> None:
    """Output, gradients and running statistics; a layer of its own rank's batch gives others."""
    order = {"batch": 6, "synchronised": synchronised}
    (found,) = pools(ranks).run("tests.harness.images:norm_layer", order)
    torch.manual_seed(1)
    x, dy = (torch.randn(6, 5, 3, 4) * 3 + 2 for _ in range(2))
    x.requires_grad_()
    layer = nn.BatchNorm2d(5)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, 5))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, 5))
    y = layer(x)
    y.backward(dy)
    theirs = {
        "y": y,
        "dx": x.grad,
        "dw": layer.weight.grad,
        "mean": layer.running_mean,
        "var": layer.running_var,
    }
    alike = {
        key: torch.allclose(torch.tensor(found[key]), value, atol=1e-4)
        for key, value in theirs.items()
    }
    db = layer.bias.grad
    assert db is not None
    assert torch.allclose(torch.tensor(found["db"]), db, atol=1e-4)
    assert found["equal_stats"], "to the bit, on all ranks"
    assert not found["early"], "nothing changes before the update"
    assert alike == {key: synchronised or key == "mean" for key in theirs}


@pytest.mark.parametrize("on_nan", [pytest.param("skip", marks=pytest.mark.full), "rollback"])
def test_a_step_that_is_not_finite_leaves_the_running_statistics_finite(
    images: DatasetInfo, tmp_path: Path, on_nan: str
) -> None:
    fault = "nan@rank=1,step=5,phase=forward"
    spec = trained(images, tmp_path, 2, on_nan=on_nan, faults=fault, checkpoint_every=2)
    assert '"injected"' in (spec.folder / "faults.jsonl").read_text()
    last = records(spec)[-1]
    assert last["fault/skipped_steps" if on_nan == "skip" else "fault/rollbacks"] == 1
    assert math.isfinite(last["val/loss"])
    assert all(torch.isfinite(tensor).all() for tensor in final(spec).model.values())
