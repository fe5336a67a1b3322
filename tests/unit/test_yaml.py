"""YAML is read as 1.2 and strictly: what a file says is what it means, and no key stands twice."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.config import Config, load_config
from nanoray.config.strict_yaml import YamlError, read_texts, read_values
from nanoray.errors import ConfigError
from nanoray.forecast.links import load_topology
from tests.harness.parsing import parse

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"


def load(tmp_path: Path, text: str, name: str = "run.yaml") -> Config:
    file = tmp_path / name
    file.write_text(text)
    return load_config(str(file), "tiny")


MEANT: list[tuple[str, str, Any]] = [
    ("comm_trace", "off", "off"),
    ("mirror", "off\ndp_mode: zero1", "off"),
    ("precision_stats", "off", "off"),
    ("seed", "0123", 123),
    ("seed", "1_000", 1000),
    ("name", "2026", "2026"),
    ("name", "1.10", "1.10"),
    ("name", "2026-01-01", "2026-01-01"),
    ("name", "no", "no"),
    ("warmup_steps", "1e1", 10),
    ("warmup_steps", "1.5e1", 15),
    ("max_steps", "6e5", 600_000),
    ("workers", "2e0", 2),
    ("lr", "3e-4", 3e-4),
    ("lr", "1E-3", 1e-3),
    ("tensorboard", "off", False),
    ("tensorboard", "Yes", True),
    ("compile", "off", False),
    ("bias", '"true"', True),
    ("env", "{A: on, B: 012, C: 1e3, D: ~, E: true, F: 1:30}", None),
    ("resume", "none", "none"),
    ("grad_clip", "&clip 0.5\nmin_lr: 0", 0.5),
]


@pytest.mark.parametrize(("key", "text", "value"), MEANT)
def test_a_value_is_what_the_file_says(tmp_path: Path, key: str, text: str, value: Any) -> None:
    config = load(tmp_path, f"{key}: {text}\n")
    if key == "env":
        value = {"A": "on", "B": "012", "C": "1e3", "D": None, "E": "true", "F": "1:30"}
    assert getattr(config, key) == value
    assert type(getattr(config, key)) is type(value)


@pytest.mark.parametrize(("key", "text", "value"), MEANT)
def test_a_word_means_the_same_in_a_file_and_in_a_flag(
    tmp_path: Path, key: str, text: str, value: Any
) -> None:
    word = text.splitlines()[0].split()[-1].strip('"')
    if key == "env":
        return
    extra = ["--dp_mode", "zero1"] if key == "mirror" else []
    flags = ["--preset", "tiny", *extra, "--min_lr", "0", f"--{key}", word]
    assert getattr(parse_args(flags, "x", "y").config, key) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lr: 1e-3\nn_layer: 2\nlr: 5e-4\n",
            "run.yaml has the key lr in line 1 and again in line 3; drop one of the two",
        ),
        ("lr: 1e-3\n'lr': 1e-3\n", "has the key lr in line 1 and again in line 2"),
        ("kube: {cpus: 1,\n  cpus: 2}\n", "has the key cpus in line 1 and again in line 2"),
        ("env:\n  A: 1\n  A: 2\n", "has the key A in line 2 and again in line 3"),
        ("warmup_steps: 1.5\n", "warmup_steps = '1.5': Input should be a valid integer"),
        ("max_steps: 1e400\n", "max_steps = '1e400': Input should be a valid integer"),
        ("comm_trace: false\n", "comm_trace = 'false' is none of off, always, every=K"),
        ("seed: 0o17\n", "seed = '0o17': Input should be a valid integer"),
        ("name: [a]\n", "name = ['a']: Input should be a valid string; write it in quotes"),
        ("a: [\n", "is not YAML: while parsing a flow node"),
        ("lr: !!python/name:os.system x\n", "could not determine a constructor for the tag"),
        ("lr: !!timestamp 2\n", "could not determine a constructor for the tag"),
        ("a: " + "[" * 3000, "is not YAML: its lists and mappings are nested too deeply"),
        ("lr: 1\n---\nlr: 2\n", "is not YAML: expected a single document"),
        ("? [1]\n: 2\n", "found unhashable key"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "unicode string" not in str(error.value)


def test_a_merge_is_no_repeated_key(tmp_path: Path) -> None:
    text = "kube: &k {cpus: 1, memory_gib: 4}\nenv: {A: x}\n"
    assert load(tmp_path, text).kube.memory_gib == 4
    assert read_texts("a: &k {x: 1, y: 2}\nb: {<<: *k, x: 3}", ("a",)) == {
        "a": {"x": "1", "y": "2"},
        "b": {"x": "3", "y": "2"},
    }


@pytest.mark.parametrize("name", ["run.yaml", "über.yml", "config.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_file_of_windows_is_read(tmp_path: Path, name: str, mark: str, end: str) -> None:
    """With its line ends, and the mark that editors put before a text in UTF-8."""
    text = "dataset: täxt.txt\nmax_steps: 7\n"
    if name.endswith(".json"):
        text = '{"dataset": "täxt.txt",\n"max_steps": 7}\n'
    file = tmp_path / name
    file.write_bytes(f"{mark}{text}".replace("\n", end).encode())
    config = load_config(str(file), "tiny")
    assert (config.dataset, config.max_steps) == ("täxt.txt", 7)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_is_told_so(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes("name: x  # über\n".encode(encoding))
    with pytest.raises(ConfigError, match=r"is not text in UTF-8 \(byte \d+\); save it in that"):
        load_config(str(file), "tiny")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("base: &base {lr: 0.5}\n<<: *base\n", {"lr": 0.5}),
        ("<<: &base {lr: 0.5}\n", {"lr": 0.5}),
        ("x-defaults: &base {lr: 0.5}\n<<: *base\nn_layer: 3\n", {"lr": 0.5, "n_layer": 3}),
        ("x-note: what I tried\nx-lr: &lr 0.5\nlr: *lr\n", {"lr": 0.5}),
        ("a: &a {lr: 0.5}\nb: &b {n_layer: 3}\n<<: [*a, *b]\n", {"lr": 0.5, "n_layer": 3}),
        ("a: &a {lr: 0.5}\nb: &b {<<: *a, n_layer: 3}\n<<: *b\n", {"lr": 0.5, "n_layer": 3}),
        ("base: &base {lr: 0.5}\n<<: *base\nlr: 0.25\n", {"lr": 0.25}),
        ("pod: &pod {cpus: 2}\nkube: {<<: *pod, memory_gib: 4}\n", {}),
        ("kube: &pod {cpus: 2}\nenv: {<<: *pod}\n", {"env": {"cpus": "2"}}),
        ("t: &t {learning_rate: 0.5}\ntraining: {<<: *t, batch_size: 3}\n", {"lr": 0.5}),
    ],
)
def test_a_key_that_only_holds_an_anchor_is_no_key(
    tmp_path: Path, text: str, keys: dict[str, Any]
) -> None:
    config = load(tmp_path, text)
    assert {key: getattr(config, key) for key in keys} == keys
    if "kube:" in text:
        assert config.kube.cpus == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: &base {lr: 0.5}\n", "unknown key base.lr; write it as a flat key: lr: 0.5"),
        ("n_layr: &n 4\nn_head: *n\n", "unknown key n_layr; did you mean n_layer?"),
        ("base: &base {lrr: 0.5}\n<<: *base\n", "unknown key lrr; did you mean lr?"),
        ("a: &a {lr: 1}\nb: {<<: *a}\n", "unknown key b.lr"),
    ],
)
def test_a_holder_that_nothing_merges_is_a_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"lr": 1, "lr": 2}', "has the key lr twice, as 1 and as 2; drop one of the two"),
        ('{"lr": 1,}', "is not JSON: "),
        ("[" * 100_000, "is not JSON: its lists and mappings are nested too deeply"),
        ("1" * 5000, "is not JSON: Exceeds the limit"),
        ("[1]", "must hold `key: value` lines, not a list"),
    ],
)
def test_json_is_read_as_strictly(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, "config.json")
    assert message in str(error.value)


def test_values_without_a_schema_have_the_types_of_yaml_1_2() -> None:
    text = "[off, yes, true, False, 12, -3, +4, 0x1f, 0o17, 1e3, .5, 1., -.inf, ~, null, 2026-01-01"
    text += ", 12:30:45, 1_000, '7', y, '', '0644']"
    (values,) = read_values(text)
    assert values == [
        *("off", "yes", True, False, 12, -3, 4, 31, 15, 1e3, 0.5, 1.0, -math.inf, None, None),
        *("2026-01-01", "12:30:45", "1_000", "7", "y", "", "0644"),
    ]
    assert read_values("a: 1\n---\n---\nb: 2") == [{"a": 1}, None, {"b": 2}]
    assert math.isnan(read_values("[.nan]")[0][0])
    with pytest.raises(YamlError, match=r'0644 is octal in YAML 1\.1 .* write 0o644, or "0644"'):
        read_values("mode: 0644")


def test_a_topology_is_read_as_strictly(tmp_path: Path) -> None:
    topology = tmp_path / "mine.yaml"
    link = "{alpha_us: 1e1, bandwidth_gb_per_s: 12}"
    lines = f"ranks_per_node: 4\nintra: {link}\ninter: {link}\nnote: 2026\n"
    topology.write_text(lines)
    read = load_topology(str(topology))
    assert (read.ranks_per_node, read.note, read.levels[0].alpha_us) == (4, "2026", 10.0)
    topology.write_text(lines + "inter: fit\n")
    with pytest.raises(ConfigError, match="has the key inter in line 3 and again in line 5"):
        load_topology(str(topology))


def test_nothing_else_in_the_package_reads_yaml() -> None:
    readers = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse(path.read_text("utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith("yaml.") and "load" in name.lower():
                readers.append(path.name)
    assert set(readers) == {"strict_yaml.py"}
