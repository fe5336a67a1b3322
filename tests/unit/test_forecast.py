"""`--dry_run --world_size N`: flags that it takes and refuses, and what it prints, beside the
numbers it is made of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import Loaded, Scale, parse_args
from nanoray.config import load_config
from nanoray.errors import ConfigError
from nanoray.forecast import scale as forecast
from nanoray.forecast.layouts import search
from nanoray.forecast.links import load_topology
from nanoray.forecast.predict import OnTopology, Speed, predict
from nanoray.forecast.scale import job_of
from nanoray.kube.__main__ import _with
from nanoray.mesh.layout import Layout
from nanoray.models.costs import flops_per_token
from nanoray.start.plan import forecast_at
from tests.harness.factorizations import factorizations

LARGE = ["--preset", "gpt2-124m", "--dry_run", "--world_size", "4096", "--tp", "4"]


def lines(*argv: str) -> list[str]:
    loaded = parse_args([*argv], "x", "y")
    assert loaded.scale is not None
    return forecast_at(loaded, loaded.scale)


def line(found: list[str], head: str) -> str:
    (one,) = [text for text in found if text.startswith(head)]
    return one


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "prepare", lambda config: pytest.fail("it read a data set"))


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
        (["--memory_gb", "80"], "memory_gb = 80 would be ignored without --dry_run"),
        (["--dry_run", "--world_size", "0"], "world_size = 0 is not a whole number above 0"),
        (["--dry_run", "--world_size", "2.5"], "world_size = 2.5 is not a whole number above 0"),
        (
            ["--dry_run", "--world_size", "8", "--memory_gb", "inf"],
            "memory_gb = inf is not a number above 0",
        ),
        (
            ["--dry_run", "--world_size", "8", "--workers", "8"],
            "workers = 8 and world_size = 8 both say how many",
        ),
        (
            ["--dry_run", "--world_sizes", "8"],
            r"unknown flag --world_sizes; did you mean --world_size\?",
        ),
    ],
)
def test_flags_that_cannot_take_effect_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(argv, "x", "y")


def test_without_its_flags_nothing_changes() -> None:
    loaded = parse_args(["--dry_run"], "x", "y")
    assert loaded == Loaded(
        load_config(), frozenset(), dry_run=True, scale=None, origins=loaded.origins
    )
    assert set(loaded.origins.values()) == {"preset shakespeare-cpu"}
    assert parse_args(["--dry_run", "--world_size", "8"], "x", "y").given == frozenset()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--world_size", "4097", "--tp", "4"],
            r"world_size = 4097 = 17\*241: ranks = dp\*tp, but tp = 4 does not",
        ),
        (
            ["--world_size", "8", "--topology", "nvlink"],
            r"unknown topology nvlink; did you mean nvlink-400g\?",
        ),
        (
            ["--world_size", "8", "--topology", "this-machine"],
            "this-machine has intra and inter = fit, .*bench layouts predicted",
        ),
        (
            ["--world_size", "8", "--precision", "bf16_pure"],
            "no prediction for precision = bf16_pure; use precision bf16,",
        ),
        (
            ["--world_size", "8", "--precision", "fp8"],
            "no prediction for precision = fp8; use precision bf16, or --dry_",
        ),
        (
            ["--world_size", "8", "--model", "resnet"],
            "world_size predicts the layers of a gpt, but model = resnet",
        ),
        (
            ["--world_size", "8", "--global_batch_size", "12"],
            r"world_size = 8 = 2\*2\*2: global_batch_size = 12 is not a multiple",
        ),
        (
            ["--world_size", "8", "--topology", "nvlink-400g", "--memory_gb", "0.0001"],
            r"no layout fits world_size = 8 = 2\*2\*2: dp\*tp\*pp = .*does not fit: needs 0\.\d+ "
            r"GB of 0.0001",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lines("--dry_run", *argv)


def test_a_topology_without_a_peak_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    link = "{alpha_us: 1, bandwidth_gb_per_s: 10}"
    path.write_text(f"ranks_per_node: 2\nintra: {link}\ninter: {link}\n")
    with pytest.raises(
        ConfigError,
        match=r"mine.yaml has no peak_tflops; write numbers .*use ethernet-25g, mig-slices",
    ):
        lines("--dry_run", "--world_size", "8", "--topology", str(path))


def test_kubes_commands_refuse_it() -> None:
    with pytest.raises(
        ConfigError, match="world_size = 8 would be ignored: `nanoray kube` predicts nothing"
    ):
        _with(Loaded(load_config(), frozenset(), True, Scale(8)), {})


# What it prints


def test_mesh_and_links() -> None:
    found = lines(*LARGE, "--topology", "nvlink-400g")
    assert (
        line(found, "mesh")
        == "mesh       4,096 ranks = dp 1024 × tp 4; 512 node(s) of 8 (nvlink-400g)"
    )
    at = found.index(line(found, "axes"))
    assert re.search(
        r"tp  1,024 group\(s\) of 4 +ranks 0 1 \.\. 3 +inside a node: 266 GB/s", found[at]
    )
    assert re.search(
        r"dp  4 group\(s\) of 1,024 +ranks 0 4 \.\. 4092 +between nodes, 2 on each", found[at + 1]
    )
    assert "grown from 480 sequences to 12288" in line(found, "batch")
    assert found[-1] == "dry run: nothing was started"


def test_the_numbers_are_the_predictors() -> None:
    found = lines(*LARGE, "--topology", "nvlink-400g")
    config = load_config(preset="gpt2-124m", overrides={"tp": 4, "global_batch_size": 12288})
    job = job_of(config, 50257, 12288, on_gpus=True)
    topology = load_topology("nvlink-400g")
    step = predict(job, Layout(dp=1024, tp=4), 12, OnTopology(topology), Speed.of(topology))
    assert (job.precision, job.bucket_mb, job.mirrored) == ("bf16", 25, False)
    assert f"{1e3 * step.step_s:.3g} ms predicted" in line(found, "step")
    tokens = 12288 * 1024 / step.step_s
    mfu = 100 * flops_per_token(job.shape) * tokens / (989.4e12 * 4096)
    assert f"{tokens:,.0f} tok/s, MFU {mfu:.1f} %" in line(found, "speed")
    assert f"{sum(step.memory.values()) / 1e9:.2f} GB per rank of 80, ddp at bf16" in line(
        found, "memory"
    )
    best = search(job, 4096, 12, OnTopology(topology), Speed.of(topology), 80.0)
    assert f"{len(factorizations(4096, tokens=1024))} layouts of 4,096 ranks" in line(
        found, "layouts"
    )
    at = found.index(line(found, "layouts"))
    for i, one in enumerate(best[:3]):
        assert found[at + 1 + i].split(". ", 1)[1].startswith(str(one.layout))
    steps = [one.best for one in best if one.best]
    place = 1 + sum(one.step_s < step.step_s for one in steps)
    assert f"dp 1024 × tp 4: number {place} of {len(steps)}" in line(found, "asked")
    whole = [one for one in steps if one.layout.cp == 1]
    assert sum(one.step_s < step.step_s for one in whole) == 2, "the third without cp"


def test_why_not_tp_16() -> None:
    wide = ["--n_head", "32", "--n_embd", "4096", "--n_layer", "32", "--micro_batch_size", "2"]
    text = "\n".join(
        lines(*LARGE, "--topology", "nvlink-400g", *wide, "--global_batch_size", "4096")
    )
    assert re.search(r"tp 16 .*: \d+\.\d\d × the step: tp [\d,.]+ ms against", text)
    assert re.search(r"tp 64, 128, \.\.\. 4096 +tp does not divide n_head = 32", text)
    assert re.search(r"pp 64, 128, \.\.\. 4096 +pp does not divide n_layer = 32", text)


def test_memory_of_devices_refuses_layouts() -> None:
    large = [
        "--preset",
        "gpt2-124m",
        "--dry_run",
        "--world_size",
        "64",
        "--topology",
        "nvlink-400g",
    ]
    sizes = ["--n_layer", "64", "--n_head", "64", "--n_embd", "8192", "--global_batch_size", "64"]
    sizes += ["--micro_batch_size", "1"]
    found = lines(*large, *sizes, "--tp", "8", "--memory_gb", "100")
    assert re.search(r"memory +125.21 GB per rank of 100: DOES NOT FIT", line(found, "memory"))
    assert line(found, "asked").startswith(
        "asked      dp 8 × tp 8: needs 125 GB of 100 (optimizer 52, parameters 26)"
    )
    assert re.search(r"dp 64 +does not fit: needs [\d.]+ GB of 100 \(optimizer", "\n".join(found))
    assert re.search(r"0 break a rule, \d+ do not fit; the best of \d+$", line(found, "layouts"))


def test_without_device_memory_nothing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    link = "{alpha_us: 1, bandwidth_gb_per_s: 10}"
    path.write_text(f"ranks_per_node: 2\nintra: {link}\ninter: {link}\npeak_tflops: 10\n")
    found = lines("--dry_run", "--world_size", "4", "--topology", str(path))
    assert "no device memory known, so none is too large (--memory_gb)" in line(found, "layouts")
    assert "MiB per rank, ddp at bf16" in line(found, "memory")
    assert "DOES NOT FIT" not in line(found, "memory")


def test_without_a_topology_it_prints_bytes_and_memory() -> None:
    found = lines(*LARGE, "--device", "cuda")
    assert "ms" not in "\n".join(found)
    assert re.search(
        r"tp  all-reduce  activations +24 × 18\.9 MB +a rank sends 679\.5 MB$", line(found, "talk")
    )
    assert (
        line(found, "step")
        == "step       give --topology NAME or FILE for seconds and the best layouts"
    )
    assert found[-1] == "dry run: nothing was started"
    alone = lines("--dry_run", "--world_size", "1")
    assert "talk       nothing: one rank" in alone


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
    loaded = parse_args(["--dry_run", "--world_size", "64", "--topology", "ethernet-25g"], "x", "y")
    run = command.launch if hasattr(command, "launch") else command.run_here
    assert run(loaded, 0.0) == 0
    assert "64 ranks = dp 64; 16 node(s) of 4 (ethernet-25g)" in capsys.readouterr().out


def test_nanochats_rules_at_eight_ranks() -> None:
    """8 x 32 x 2048 = 524,288 tokens a step; rates as given; decay and steps follow from the larger
    vocabulary.
    """
    found = lines(
        "--preset", "nanochat-d12", "--dry_run", "--world_size", "8", "--topology", "nvlink-400g"
    )
    assert "32 seq × 1 accum × 8 dp × 2,048 tok = 524,288 tok/step" in line(found, "batch")
    scale = 12 * 12 * 768**2 + 50304 * 768  # padded: 50,257 tokens
    more = scale / (12 * 12 * 768**2 + 32768 * 768)
    assert line(found, "scale  global_batch_size = 256: 2^19 tok")
    assert line(
        found,
        f"scale  max_steps = {round(12 * scale / 2**19)}: D = 12 tok × S = {scale:,} parameters",
    )
    assert line(found, "scale  lr = 0.0006: 0.0006 × √(B/B_ref = 1)")
    assert line(found, "scale  muon_lr = 0.02: 0.02 × √(B/B_ref = 1)")
    assert line(
        found,
        f"scale  weight_decay = {0.1 / more:.4g}: 0.1 × √(B/B_ref = 1) × D_ref/D = {1 / more:.3g}",
    )
    assert " ms predicted = " in line(found, "step")
    assert re.search(r"memory     \d+\.\d+ GB per rank of 80, ", line(found, "memory"))
    assert "optimizer = muon with pp: it needs whole matrices" in "\n".join(found)
    assert "1. dp 8 " in "\n".join(found)


def test_half_the_ranks_get_the_same_step() -> None:
    """4 ranks: the derived batch is in units of their micro batches, and so accumulates twice."""
    found = lines("--preset", "nanochat-d12", "--dry_run", "--world_size", "4")
    assert "32 seq × 2 accum × 4 dp × 2,048 tok = 524,288 tok/step" in line(found, "batch")
