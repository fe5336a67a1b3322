"""`--dry_run --world_size N`: flags that it takes and refuses, and what it prints, beside the
numbers it is made of.
"""

from __future__ import annotations

from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.cli import run_plan as planning
from nanoray.cli.forecast.dry_run import dry_run_lines
from nanoray.cli.forecast.job import job_of
from nanoray.cli.forecast.layouts import search
from nanoray.cli.forecast.links import load_topology
from nanoray.cli.forecast.predict import OnTopology, Speed, predict
from nanoray.cli.run_plan import forecast_at, known_dataset
from nanoray.config import load_config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError
from nanoray.models.costs import flops_per_token

LARGE = ["--preset", "gpt2-124m", "--dry_run", "--world_size", "4096", "--tp", "4"]
LARGE += ["--global_batch_size", "12288"]


def lines(*argv: str) -> list[str]:
    loaded = parse_args([*argv], "x", "y")
    assert loaded.scale is not None
    return forecast_at(loaded, loaded.scale)


def line(found: list[str], head: str) -> str:
    (one,) = [text for text in found if text.startswith(head)]
    return one


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "prepare", lambda config: pytest.fail("it read a data set"))


# Flags


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--world_size", "8"],
            "world_size = 8 would be ignored without --dry_run; add it, or drop --world_size",
        ),
        (
            ["--topology", "x", "--dry_run"],
            "topology = x would be ignored without --world_size; add it",
        ),
        (["--memory_gb", "80"], "memory_gb = 80.0 would be ignored without --dry_run"),
        (["--dry_run", "--world_size", "0"], "world_size = 0 is not above 0"),
        (["--dry_run", "--world_size", "2.5"], "invalid int value: '2.5'"),
        (
            ["--dry_run", "--world_size", "8", "--memory_gb", "inf"],
            "memory_gb = inf is not above 0",
        ),
        (
            ["--dry_run", "--world_size", "8", "--workers", "8"],
            "workers = 8 and world_size = 8 both say how many",
        ),
    ],
)
def test_flags_that_cannot_take_effect_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(argv, "x", "y")


# What it prints


def test_the_numbers_are_the_predictors() -> None:
    found = lines(*LARGE, "--topology", "nvlink-400g")
    assert line(found, "mesh") == "mesh       4,096 rank(s) = dp 1024 × tp 4"
    assert line(found, "placement") == "placement  512 node(s) of 8 (nvlink-400g)"
    config = load_config(preset="gpt2-124m", overrides={"tp": 4, "global_batch_size": 12288})
    job = job_of(config, 50257, 12288, on_gpus=True)
    topology = load_topology("nvlink-400g")
    network, speed = OnTopology(topology), Speed.of(topology)
    step = predict(job, Layout(dp=1024, tp=4), 12, network, speed)
    assert (job.precision, job.bucket_mb, job.mirrored) == ("bf16", 25, False)
    assert f"{1e3 * step.step_s:.3g} ms predicted" in line(found, "step")
    tokens = 12288 * 1024 / step.step_s
    mfu = 100 * flops_per_token(job.shape) * tokens / (989.4e12 * 4096)
    assert line(found, "step").endswith(f"; {tokens:,.0f} tok/s, MFU {mfu:.1f} %")
    assert f"{sum(step.memory.values()) / 1e9:.2f} GB per rank of 80, ddp at bf16" in line(
        found, "memory"
    )
    best = search(job, 4096, 12, network, speed, 80.0)
    assert f"the fastest of {len(best)} that fit" in line(found, "layouts")
    at = found.index(line(found, "layouts"))
    for i, one in enumerate(best[:3]):
        assert found[at + 1 + i].split(". ", 1)[1].startswith(str(one.layout))
    assert found[-1] == "dry run: nothing was started"


def test_without_a_topology_it_is_the_dry_run_of_as_many_workers() -> None:
    found = lines(*LARGE, "--device", "cuda")
    config = load_config(
        preset="gpt2-124m", overrides={"tp": 4, "global_batch_size": 12288, "device": "cuda"}
    )
    layout = Layout.of(config, 4096)
    same = dry_run_lines(config, [], layout, known_dataset(config), "ranks that need not exist")
    assert found[: len(same)] == same
    # A model without formulas for its layers has no memory.
    resnet = lines("--dry_run", "--world_size", "4", "--model", "resnet")
    assert [text.split()[0] for text in resnet[:5]] == [
        "mesh",
        "placement",
        "data",
        "batch",
        "model",
    ]
    assert "classes 10" in line(resnet, "data")
    with pytest.raises(ConfigError, match="memory_gb = 8 would be ignored"):
        lines("--dry_run", "--world_size", "4", "--model", "resnet", "--memory_gb", "8")


@pytest.mark.parametrize("module", ["nanoray.launch.__main__", "nanoray.train.__main__"])
def test_both_commands_print_it_and_start_nothing(
    module: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    command = importlib.import_module(module)
    for name in ("local_slots", "_local_rendezvous", "connected"):
        if hasattr(command, name):
            monkeypatch.setattr(
                command, name, lambda *args, **more: pytest.fail("it looked for devices")
            )
    flags = ["--world_size", "64", "--global_batch_size", "64", "--topology", "ethernet-25g"]
    loaded = parse_args(["--dry_run", *flags], "x", "y")
    run = command.launch if hasattr(command, "launch") else command.run_here
    assert run(loaded, 0.0) == 0
    assert "placement  16 node(s) of 4 (ethernet-25g)" in capsys.readouterr().out


def test_nanochats_recipe_at_eight_ranks() -> None:
    """8 x 32 x 2048 = 524,288 tokens a step, for 12 tokens per parameter of matrices and lm_head."""
    found = lines(
        "--preset", "nanochat-d12", "--dry_run", "--world_size", "8", "--topology", "nvlink-400g"
    )
    assert "32 seq × 1 accum × 8 dp × 2,048 tok = 524,288 tok/step" in line(found, "batch")
    scale = 12 * 12 * 768**2 + 50304 * 768  # padded: 50,257 tokens
    reference = 12 * 12 * 768**2 + 32768 * 768
    config = load_config(preset="nanochat-d12")
    assert config.max_steps == round(12 * scale / 2**19)
    assert config.weight_decay == pytest.approx(0.1 * reference / scale, rel=1e-3)
    # Muon needs whole matrices, so no layout cuts them.
    assert " 1. dp 8 " in "\n".join(found)
