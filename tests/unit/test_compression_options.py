"""What compressed gradients do not go with, in words."""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.config import field_group, load_config, make_config, recipe_of
from nanoray.errors import ConfigError
from nanoray.forecast.job import job_of

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"dp_mode": "zero1"},
        "grad_compress = bf16 with dp_mode = zero1: .* use dp_mode ddp or ddp_by_hand, or drop",
    ),
    ({"dp_mode": "fsdp"}, "grad_compress = bf16 with dp_mode = fsdp"),
    ({"allreduce": "ring"}, "grad_compress = bf16 with allreduce = ring: .* drop one of the two"),
    ({"tp": 2}, "grad_compress = bf16 with tp = 2: only whole models .* drop tp, or grad_compress"),
    ({"pp": 2}, "grad_compress = bf16 with pp = 2"),
    ({"ep": 2, "experts": 4, "dp_mode": "ddp_by_hand"}, "grad_compress = bf16 with ep = 2"),
    (
        {"precision": "bf16_pure"},
        "precision = bf16_pure: gradients have 16 bits already; use precision bf16, or drop",
    ),
]


@pytest.mark.parametrize(("settings", "text"), CASES)
def test_what_cannot_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(preset="tiny", overrides={"grad_compress": "bf16", **settings})


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="grad_compress = 'int4'"):
        make_config({"micro_batch_size": 1, "grad_compress": "int4"})


def test_it_changes_the_recipe() -> None:
    assert field_group("grad_compress") == "optim"
    config = load_config(preset="tiny", overrides={"grad_compress": "fp16"})
    assert config.expected_val_loss == {}
    assert recipe_of(config)["grad_compress"] == "fp16"


def test_a_forecast_of_it_is_refused() -> None:
    config = load_config(preset="tiny", overrides={"grad_compress": "bf16"})
    with pytest.raises(
        ConfigError,
        match="a step is not predicted for grad_compress = bf16; use grad_compress",
    ):
        job_of(config, 65, 8)
