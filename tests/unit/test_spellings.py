"""Keys that say more than one thing in one text, and the spellings of older versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.cli import parse_args
from nanoray.config import Config, load_config, make_config
from nanoray.config.spellings import FIXED, PARTS, join, split
from nanoray.errors import ConfigError

BASE: dict[str, Any] = {"micro_batch_size": 1}
SPELLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "fp8:row"}, {"precision": "fp8", "fp8_scaling": "row"}),
    (
        {"precision": "bf16_pure:stochastic"},
        {"precision": "bf16_pure", "rounding": "stochastic"},
    ),
    ({"precision": "fp16_pure:master"}, {"precision": "fp16_pure", "master_weights": "fp32"}),
    (
        {"optimizer": "sgd:nesterov", "momentum": 0.9},
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    ),
    ({"dp_mode": "fsdp:grad_op"}, {"dp_mode": "fsdp", "fsdp_reshard": "grad_op"}),
    (
        {"dp_mode": "fsdp:grad_op:bf16"},
        {"dp_mode": "fsdp", "fsdp_reshard": "grad_op", "fsdp_gather": "bf16"},
    ),
    (
        {"pp_schedule": "interleaved:4", "pp": 1},
        {"pp_schedule": "interleaved", "pp": 1, "pp_chunks": 4},
    ),
    (
        {"micro_batch_size": "auto", "global_batch_size": 24},
        {"micro_batch_size": 0, "global_batch_size": 24, "micro_batch_search": True},
    ),
]


def parse(*argv: str) -> Config:
    return parse_args(list(argv), "prog", "what").config


@pytest.mark.parametrize(("text", "fields"), SPELLED)
def test_a_text_is_its_parts_and_back(text: dict[str, Any], fields: dict[str, Any]) -> None:
    done = split(text)
    assert {key: done[key] for key in fields} == fields
    assert join(done) == text
    if "pp" not in text:  # one stage has no schedule
        assert make_config(BASE | text) == make_config(BASE | fields)


def test_a_part_that_is_not_written_has_its_default() -> None:
    assert split({"dp_mode": "fsdp:bf16", "fsdp_reshard": "grad_op"})["fsdp_reshard"] == "full"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_mode": "fsdp:fp8"}, "dp_mode = fsdp:fp8 has an unknown part 'fp8'; use fsdp:grad_op"),
        ({"dp_mode": "zero1:bf16"}, "dp_mode = zero1:bf16 has an unknown part 'bf16'"),
        ({"pp_schedule": "interleaved:0"}, "unknown part '0'; use interleaved:3"),
        ({"precision": "fp16_pure:stochastic"}, "unknown part 'stochastic'"),
    ],
)
def test_an_unknown_part_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(BASE | values)
    assert message in str(error.value)


@pytest.mark.parametrize("key", [*(part.field for part in PARTS), *FIXED])
def test_an_older_key_names_the_new_spelling(key: str, tmp_path: Path) -> None:
    new = {part.field: f"write {part.key} {part.example}" for part in PARTS}
    message = new.get(key, f"{key} is fixed at ")
    with pytest.raises(ConfigError, match=message):
        parse(f"--{key}", "none")
    file = tmp_path / "mine.yaml"
    file.write_text(f"{key}: none\n")
    with pytest.raises(ConfigError, match=message):
        load_config(str(file))


def test_the_new_spelling_has_the_users_value() -> None:
    message = "write pp_schedule interleaved:8"
    with pytest.raises(ConfigError, match=message):
        parse("--pp_chunks", "8")
    with pytest.raises(ConfigError, match=message):
        parse("--pp_chunks=8")
    # A value that the part cannot have leaves the example.
    with pytest.raises(ConfigError, match="write pp_schedule interleaved:3"):
        parse("--pp_chunks=none")


def test_every_example_is_a_spelling() -> None:
    for part in PARTS:
        values = split({part.key: part.example})
        assert values[part.key] in part.owners
        assert part.field in values


def test_the_config_json_of_an_older_run_loads_and_resumes(tmp_path: Path) -> None:
    """It has the fields of the parts, each with a key of its own."""
    older = make_config(
        BASE | {"dp_mode": "fsdp", "fsdp_gather": "bf16", "val_fraction": 0.2, "name": "older"}
    )
    (tmp_path / "config.json").write_text(older.to_json())
    assert json.loads(older.to_json())["fsdp_gather"] == "bf16"
    assert load_config(str(tmp_path / "config.json")) == older
    resumed = parse("--resume", str(tmp_path))
    assert (resumed.dp_mode, resumed.fsdp_gather, resumed.val_fraction) == ("fsdp", "bf16", 0.2)


def test_a_flag_replaces_a_key_with_all_its_parts(tmp_path: Path) -> None:
    older = make_config(BASE | {"dp_mode": "fsdp", "fsdp_gather": "bf16"})
    (tmp_path / "config.json").write_text(older.to_json())
    plain = parse("--resume", str(tmp_path), "--dp_mode", "fsdp")
    assert plain.fsdp_gather == "fp32"
    assert parse("--resume", str(tmp_path), "--dp_mode", "zero1").dp_mode == "zero1"
    kept = parse("--resume", str(tmp_path), "--dp_mode", "fsdp:grad_op:bf16")
    assert (kept.fsdp_reshard, kept.fsdp_gather) == ("grad_op", "bf16")


def test_the_fields_of_a_config_are_written_as_users_write_them(tmp_path: Path) -> None:
    """As `nanoray kube` does: the YAML file of a pod has no key that a user could not write."""
    config = make_config(
        BASE | {"dp_mode": "fsdp:grad_op:bf16", "optimizer": "sgd:nesterov", "momentum": 0.9}
    )
    values = join(config.model_dump(exclude_defaults=True))
    assert not {part.field for part in PARTS} & values.keys()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values | {"name": "run"}))
    assert load_config(str(file)) == config


def test_a_part_without_its_owner_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_gather = bf16 would be ignored: dp_mode = zero1"):
        make_config(BASE | {"dp_mode": "zero1", "fsdp_gather": "bf16"})
