"""Which options belong to which model and optimizer, nested YAML keys, epochs in place of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli.forecast.dry_run import dry_run_lines
from nanoray.cli.run_plan import plan
from nanoray.config import Config, Settings, load_config, make_config
from nanoray.config.layout import Layout
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError

IMAGES = DatasetInfo(
    "cifar10", "cifar10: a note", Path("/none"), "uint8", 10, 50_000, 10_000, "", "", {}, "images"
)
TEXT = replace(
    IMAGES, name="text", dtype="uint16", vocab_size=65, train_tokens=6_400, kind="tokens"
)
RESNET: dict[str, Any] = {"model": "resnet", "global_batch_size": 128}


# ---- nested keys ----------------------------------------------------------------------------------------------------


def load(tmp_path: Path, text: str, **flags: Any) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(str(path), overrides=flags)


NESTED = """
model: {name: resnet, num_layers: 50}
training: {batch_size: 256, num_epochs: 3, learning_rate: 0.2, optimizer: sgd}
momentum: 0.9
"""


# ---- epochs ---------------------------------------------------------------------------------------------------------


def planned(config: Config, dataset: DatasetInfo, dp: int = 2) -> tuple[Config, list[str]]:
    settings = plan(Settings(config), Layout(dp=dp), dataset)
    return settings.config, list(settings.notes)


def test_epochs_become_steps_of_the_batch_and_the_dataset() -> None:
    config, notes = planned(make_config(RESNET | {"num_epochs": 3}), IMAGES)
    assert (config.max_steps, config.num_epochs) == (1172, 0), (
        "150,000 images, the last batch is shared"
    )
    assert notes == ["epochs max_steps = 1172: 3 epoch(s) × 50,000 images / 128 per step"]
    assert make_config(config.model_dump()) == config, "config.json says what ran"
    per_rank, _ = planned(
        make_config({"model": "resnet", "micro_batch_size": 50, "num_epochs": 1}), IMAGES, dp=4
    )
    assert per_rank.max_steps == 250
    text, notes = planned(
        make_config({"micro_batch_size": 5, "block_size": 64, "num_epochs": 2}), TEXT
    )
    assert text.max_steps == 20
    assert "2 epoch(s) × 100 sequences / 10 per step" in notes[0]


def test_epochs_and_steps_replace_each_other_layer_by_layer(tmp_path: Path) -> None:
    assert load(tmp_path, NESTED, max_steps="7").num_epochs == 0
    assert load(tmp_path, NESTED, max_steps="7").max_steps == 7
    assert load(tmp_path, "max_steps: 7\nmicro_batch_size: 1", num_epochs="2").num_epochs == 2
    assert load_config(preset="tiny", overrides={"num_epochs": 1}).num_epochs == 1
    with pytest.raises(
        ConfigError, match=r"num_epochs = 2 and max_steps = 7 in .*run\.yaml contradict each other"
    ):
        load(tmp_path, "max_steps: 7\nnum_epochs: 2\nmicro_batch_size: 1")
    with pytest.raises(
        ConfigError, match="num_epochs = 2 and max_steps = 7 in the flags contradict each other"
    ):
        load(tmp_path, "micro_batch_size: 1", num_epochs="2", max_steps="7")
    assert load(tmp_path, "max_steps: 7\nnum_epochs: 0\nmicro_batch_size: 1").max_steps == 7, (
        "a run's config.json"
    )


def test_a_dry_run_counts_images() -> None:
    config = make_config(RESNET | {"optimizer": "sgd", "momentum": 0.9, "max_steps": 10})
    lines = "\n".join(dry_run_lines(config, [], Layout.of(config, 2), IMAGES, "here"))
    assert "64 images × 1 accum × 2 dp = 128 images/step, 10 steps = 1,280 images" in lines
    assert "269,722 parameters" in lines
    assert "classes 10" in lines
