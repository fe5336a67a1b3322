"""The stand-ins for packages that a GPU machine may lack read and refuse what the real ones do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import standins

FOLDER = Path(standins.__file__).parent
ROOT = FOLDER.parents[2]
# Values as flags and files give them: texts of every type, and wrong ones of every limit.
GIVEN: list[dict[str, Any]] = [
    {"max_steps": "6e5", "lr": "1e-3", "bias": "yes", "compile": "cuda_graphs", "workers": "4"},
    {"compile": "true", "workers": "auto", "spares": 2, "sync_bits": "8", "name": 2026},
    {"env": ["A=1", "B=x"], "precision": "fp8:row", "dp_mode": "fsdp:bf16"},
    {"faults": "nan@rank=0,step=5", "kube": {"namespace": "here", "storage_gib": "7"}},
    {"expected_val_loss": {"shakespeare": "1.5"}, "dropout": 0},
    {"max_steps": "many"},
    {"max_steps": -1},
    {"lr": "inf"},
    {"lr": "fast"},
    {"beta2": 1.0},
    {"compile": "perhaps"},
    {"precision": "fp9"},
    {"name": "a b"},
    {"out_dir": ""},
    {"resume": None},
    {"spares": "some"},
    {"kube": {"namespaces": "x"}},
    {"kube": {"namespace": "A"}},
    {"expected_val_loss": 3},
    {"tp": 2, "loss_chunk": 8},
    {"backend": "mpi"},
    {"backend": "a.module:name"},
    {"backend": 5},
    {"upload": "s3://bucket/runs"},
    {"upload": "s3:bucket"},
    {"upload": "s3://key:secret@bucket"},
    {"resume": "ftp://there"},
    {"micro_batch_size": 1, "seed": 2**63},
]
SCRIPT = """
import json, sys
import pydantic, yaml
from nanoray.config import Config, load_config, make_config
from nanoray.config.layers import PRESET_DIR
from nanoray.errors import ConfigError
MICRO = {"micro_batch_size": 2}
out = {"files": [pydantic.__file__, yaml.__file__], "fields": {}, "presets": {}, "given": []}
for key, field in Config.model_fields.items():
    out["fields"][key] = [field.description, repr(field.default), field.json_schema_extra]
for path in sorted(PRESET_DIR.glob("*.yaml")):
    out["presets"][path.stem] = load_config(preset=path.stem).model_dump()
for values in json.loads(sys.argv[1]):
    try:
        out["given"].append(make_config({**MICRO, **values}).model_dump())
    except ConfigError as error:
        out["given"].append(str(error))
config = make_config(MICRO | {"max_steps": 7})
copy = config.model_copy(update={"seed": 5})
assert config == make_config(MICRO | {"max_steps": "7"}) and config != copy and copy.seed == 5
assert config.model_fields_set == {"max_steps", *MICRO}
try:
    config.seed = 3
except pydantic.ValidationError:
    out["frozen"] = True
print(json.dumps(out))
"""


def dump(path: str) -> dict[str, Any]:
    """What a process with this PYTHONPATH reads."""
    env = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, json.dumps(GIVEN)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stand ins")
    for name in ("pydantic", "yaml"):
        shutil.copy(FOLDER / f"{name}.py", folder)
    ours = dump(str(folder))
    assert all(file.startswith(str(folder)) for file in ours["files"])
    return dump(""), ours


def test_all_presets_and_fields_are_read_as_by_pydantic(both: tuple[Any, Any]) -> None:
    real, ours = both
    assert ours["presets"] == real["presets"]
    assert [*ours["fields"].items()] == [*real["fields"].items()]
    assert ours["frozen"]


@pytest.mark.parametrize("number", range(len(GIVEN)), ids=[str(given) for given in GIVEN])
def test_values_are_converted_and_refused_as_by_pydantic(
    both: tuple[Any, Any], number: int
) -> None:
    """Both give the same values, or both refuse them and name the same key first."""
    real, ours = (each["given"][number] for each in both)
    if isinstance(real, str):
        assert isinstance(ours, str), f"pydantic says {real}"
        assert ours.partition(":")[0] == real.partition(":")[0]
    else:
        assert ours == real


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n", "is not YAML: line 2 is not `key: value`; PyYAML is missing here: b: 1"),
        ("a: [1, 2]\n", "is not YAML: line 1 has more than a plain word; PyYAML is missing here"),
        ("a: 1\na: 2\n", "is not YAML: line 2 has the key a again; drop one of the two"),
    ],
)
def test_more_than_lines_of_keys_is_refused(text: str, message: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / "yaml.py", tmp_path)
    script = "from nanoray.config.strict_yaml import YamlError, read_texts\nimport sys\n"
    script += (
        "try:\n    print(read_texts(sys.argv[1]))\nexcept YamlError as error:\n    print(error)\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", script, text]
    told = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert message in told.stdout, told.stderr


SMI = """#!/bin/sh
echo "GPU-1, NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled, 580.159.04"
echo "GPU-2, Tesla V100-SXM2-16GB, 16160, 7.0, [N/A], 580.159.04"
"""


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "pynvml.py", tmp_path)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    script = "from nanoray.host.gpus import discover_gpus, driver_version\n"
    script += "print([(d.uuid, d.name, d.memory_bytes >> 20, d.bf16) for d in discover_gpus()])\n"
    script += "print(driver_version())\n"
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    env |= {"PYTHONPATH": str(tmp_path), "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == [
        "[('GPU-1', 'NVIDIA H100 80GB HBM3', 81559, True), "
        "('GPU-2', 'Tesla V100-SXM2-16GB', 16160, False)]",
        "580.159.04",
    ], found.stderr
    # Without the program there is no GPU.
    env["PATH"] = str(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == ["[]", ""], found.stderr
