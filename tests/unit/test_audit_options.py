"""What an audit of gradients does not go with, in words."""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.config import load_config, recipe_of
from nanoray.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"tp": 2},
            "audit_every = 4 with tp = 2: a rank has a part of the model, so no other rank can "
            "compute its",
        ),
        ({"pp": 2, "dp_mode": "ddp_by_hand"}, "with pp = 2: a rank has a part of the model"),
        (
            {"ep": 2, "experts": 4, "dp_mode": "ddp_by_hand"},
            "with ep = 2: .* use audit_every 0, or drop ep",
        ),
        ({"dp_mode": "fsdp"}, "with dp_mode = fsdp: a rank has a part of the weights"),
        (
            {"model": "resnet", "sync_batchnorm": True},
            "sync_batchnorm = True: a rank's gradient needs all ranks'",
        ),
        ({"model": "own"}, "with model = own: only a rank itself has its batches and draws"),
        (
            {"workers": 1},
            "audit_every = 4 would be ignored: there is only one rank; .* --audit_every 0",
        ),
        ({"audit_every": -1}, "audit_every = -1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(preset="tiny", overrides={"audit_every": 4, **settings})


def test_it_does_not_change_the_recipe() -> None:
    assert "audit_every" not in recipe_of(load_config(preset="tiny", overrides={"audit_every": 4}))
