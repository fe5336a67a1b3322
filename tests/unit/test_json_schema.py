"""The JSON schema of a run's YAML file: an editor accepts and refuses what `--config` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nanoray.__main__ import main
from nanoray.cli import flag_names
from nanoray.config import Config, load_config
from nanoray.config.json_schema import json_schema, schema_text
from nanoray.config.merge import PRESET_DIR
from nanoray.errors import ConfigError

SCHEMA = PRESET_DIR.parent / "run.schema.json"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples/configs"
FILES = sorted([*PRESET_DIR.glob("*.yaml"), *EXAMPLES.glob("*.yaml")])
CHECK = jsonschema.Draft202012Validator(json_schema())


def test_the_committed_schema_is_the_generated_one() -> None:
    """`make docs` writes it."""
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


def test_a_flag_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--schema"])
    assert (end.value.code, capsys.readouterr().out) == (0, schema_text())


def test_it_is_a_schema_with_every_key_and_no_other_words() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert set(flag_names()) < set(CHECK.schema["properties"])
    words = json.dumps(CHECK.schema)
    # pydantic's names of limits, where it does not know how to write them
    assert not any(f'"{word}"' in words for word in ("ge", "gt", "le", "lt", "flag"))


def test_the_values_of_a_configuration_pass() -> None:
    values = Config(micro_batch_size=2, env={"A": None}, faults="kill@rank=1,step=3").model_dump()
    CHECK.validate({key: values[key] for key in values.keys() & CHECK.schema["properties"]})


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_preset_or_example_names_the_schema_and_passes(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    mark, _, place = text.splitlines()[0].partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (file.parent / place).resolve() == SCHEMA
    CHECK.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("values", "passes"),
    [
        ({"preset": "tiny", "lr": 3e-4}, True),
        ({"preset": "tiny", "micro_batch_size": "auto"}, True),
        ({"micro_batch_size": 2, "env": {"OMP_NUM_THREADS": 2, "TOKEN": None}}, True),
        ({"micro_batch_size": 2, "env": ["A=1", "TOKEN"]}, True),
        ({"micro_batch_size": 2, "faults": [{"kind": "kill", "rank": 1, "step": 3}]}, True),
        ({"model": {"name": "gpt", "num_layers": 2}, "training": {"batch_size": 4}}, True),
        ({"micro_batch_size": 2, "kube": {"cpus": 2, "ranks_per_pod": 2}}, True),
        ({"micro_batch_size": 2, "workers": "auto", "compile": "cuda_graphs"}, True),
        ({"preset": "none-such"}, False),
        ({"preset": "tiny", "learning_rate": 3e-4}, False),
        ({"preset": "tiny", "lr": "fast"}, False),
        ({"preset": "tiny", "n_layer": 0}, False),
        ({"preset": "tiny", "n_layer": 2.5}, False),
        ({"preset": "tiny", "grad_accum_steps": -1}, False),
        ({"preset": "tiny", "optimizer": "adam"}, False),
        ({"preset": "tiny", "tensorboard": "perhaps"}, False),
        ({"preset": "tiny", "micro_batch_size": "most"}, False),
        ({"preset": "tiny", "kube": {"pods": 2}}, False),
        ({"preset": "tiny", "model": {"name": "gpt", "depth": 2}}, False),
        ({"preset": "tiny", "training": {"batch_size": "big"}}, False),
    ],
    ids=lambda value: value if isinstance(value, bool) else json.dumps(value)[1:40],
)
def test_it_accepts_what_the_loader_accepts(
    tmp_path: Path, values: dict[str, Any], passes: bool
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    loads = True
    try:
        load_config(str(file))
    except ConfigError:
        loads = False
    assert (CHECK.is_valid(values), loads) == (passes, passes)
