"""The table of conflicts: every row is reached by its smallest configuration, and says its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.cli.run_plan import plan
from nanoray.config import Config, load_config, make_config
from nanoray.config.conflict_rows import Conflict, Rule, spell
from nanoray.config.conflicts import TABLE, first, refuse, refuse_sharing
from nanoray.config.layout import Layout
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError

# Values of each key, in the order in which they are tried for a condition
VALUES: dict[str, tuple[Any, ...]] = {
    "micro_batch_search": (False, True),
    "model": ("gpt", "resnet", "own"),
    "experts": (0, 4),
    "ep": (1, 2),
    "tp": (1, 2),
    "pp": (1, 2),
    "cp": (1, 2),
    "pp_chunks": (0, 2, 1),
    "pp_schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble"),
    "dp_mode": ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"),
    "precision": ("auto", "fp32", "tf32", "fp16", "bf16_pure", "fp16_pure", "fp8"),
    "optimizer": ("adamw", "sgd", "muon"),
    "attention": ("auto", "flash", "cudnn"),
    "device": ("auto", "cpu", "cuda"),
    "compile": (False, True, "cuda_graphs"),
    "dataset": ("auto", "stdlib", "cifar10"),
    "spares": ("auto", 1),
    "workers": ("auto", 1),
    "recovery": ("in_place", "restart"),
    "activation_checkpointing": ("none", "block"),
    "allreduce": ("backend", "ring"),
    "comm_trace": ("off", "always"),
    "grad_compress": ("none", "bf16", "fp16"),
    "profile": ("", "5:8"),
    "tokenizer": ("auto", "byte"),
    "positions": ("learned", "rotary"),
    "init_from": ("", "gpt2"),
    "gelu": ("exact", "tanh"),
    "mirror": ("auto", "off"),
    "fsdp_gather": ("fp32", "bf16"),
    "fsdp_reshard": ("full", "grad_op"),
    "fp8_scaling": ("tensor", "row"),
    "master_weights": ("none", "fp32"),
    "rounding": ("nearest", "stochastic"),
    "backend": ("auto", "nccl"),
    "resnet_depth": (20, 32),
    "dropout": (0.0, 0.1),
    "label_smoothing": (0.0, 0.1),
    "momentum": (0.0, 0.9),
    "bias": (False, True),
    "sync_batchnorm": (False, True),
    "nesterov": (False, True),
    "sequence_parallel": (False, True),
    "eval_every": (250, 0),
    "muon_lr": (0.02, 0.1),
    "experts_per_token": (2, 3),
    "balance_loss": (0.01, 0.5),
    "z_loss": (0.001, 0.5),
    "target_loss": (0.0, 2.0),
    "schedule": ("cosine", "wsd", "constant"),
    "decay_fraction": (0.65, 0.1),
    "weight_decay": (0.1, 0.2),
    "beta1": (0.9, 0.8),
    "beta2": (0.99, 0.9),
    "upload_timeout": (300.0, 10.0),
    "upload": ("", "file:///x"),
}
# What a key needs beside it, so that its own row is the only one
AUTO = {"micro_batch_size": 0, "global_batch_size": 24}
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("micro_batch_search", "grad_accum_steps"): AUTO,
    ("micro_batch_search", "model"): AUTO,
    ("allreduce", "ep"): {"experts": 4, "dp_mode": "ddp_by_hand"},
    **{
        ("grad_compress", key): {"dp_mode": "ddp_by_hand"}
        for key in ("tp", "pp", "precision", "workers")
    },
    ("grad_compress", "ep"): {"experts": 4, "dp_mode": "ddp_by_hand"},
    ("audit_every", "ep"): {"experts": 4, "dp_mode": "ddp_by_hand"},
    ("statistics_every", "ep"): {"experts": 4, "dp_mode": "ddp_by_hand"},
    ("ep", "dp_mode"): {"experts": 4},
    ("ep", "replicas"): {"experts": 4, "dp_mode": "zero1"},
    ("compile", "sync_batchnorm"): {"model": "resnet"},
    ("audit_every", "sync_batchnorm"): {"model": "resnet"},
    ("fsdp_gather", "precision"): {"dp_mode": "fsdp"},
    ("fsdp_gather", "model"): {"dp_mode": "fsdp"},
    ("pp_schedule", "compile"): {"pp": 2},
    ("pp_schedule", "activation_checkpointing"): {"pp": 2},
    ("pp_schedule", "dp_mode"): {"pp": 2},
    ("nesterov", "momentum"): {"optimizer": "sgd"},
    ("pp_chunks", "pp_schedule"): {"pp": 2},
    ("rounding", "master_weights"): {"precision": "bf16_pure"},
    ("precision", "momentum"): {"optimizer": "sgd"},
}
# Configurations that break the rules of arithmetic, and a part of the message
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "ep_divides": ({"experts": 4, "ep": 3, "dp_mode": "zero1"}, "ep = 3 does not divide"),
    "stop_is_reached": ({"stop_at": 2001}, "stop_at = 2001 is beyond max_steps = 2000"),
    "warmup_is_reached": ({"seq_warmup_steps": 2001}, "seq_warmup_steps = 2001 is beyond"),
    "lengths_double": ({"seq_warmup_steps": 9, "block_size": 24}, "block_size = 24 is not 2, 4"),
    "trace_is_reached": ({"comm_trace": "every=4000"}, "would trace nothing: its first step is"),
    "tp_divides": ({"tp": 3}, "tp = 3 must divide n_head = 4"),
    "tp_divides_sequences": (
        {"tp": 2, "sequence_parallel": True, "block_size": 33},
        "sequence_parallel cuts sequences over tp = 2 ranks",
    ),
    "cp_divides_sequences": ({"cp": 3, "block_size": 32}, "which does not divide block_size = 32"),
    "stages_divide": ({"pp": 3}, "pp = 3 does not divide n_layer = 4"),
    "groups_divide": (
        {"pp": 2, "pp_schedule": "interleaved", "grad_accum_steps": 3},
        "takes micro batches in groups of pp = 2",
    ),
    "upload_is_elsewhere": (
        {"upload": f"file://{Path.cwd()}/runs", "out_dir": "runs/../runs"},
        "is out_dir, where the run itself is written",
    ),
    "env_has_no_secret": (
        {"env": {"AWS_SECRET_ACCESS_KEY": "x"}, "upload": "file:///x"},
        "env AWS_SECRET_ACCESS_KEY=... would be written into config.json",
    ),
    "profile_is_reached": ({"profile": "1999:2002"}, "but the run ends at step 2000"),
    "ranks_make_replicas": ({"tp": 2, "workers": 3}, "but tp = 2 does not divide 3 rank(s)"),
    "ddp_has_no_pipeline": ({"pp": 2, "workers": 4}, "ddp with pp = 2 and dp = 2: torch's DDP"),
    "groups_shard_something": (
        {"dp_mode": "zero1", "replicas": 2, "workers": 2},
        "leaves one rank in each group, which shards nothing",
    ),
    "min_lr_is_reached": (
        {"schedule": "constant", "min_lr": 0.0005},
        "min_lr = 0.0005 would be ignored: schedule = constant; drop --min_lr",
    ),
}
ROWS = [row for row in TABLE if isinstance(row, Conflict)]
RULES = [row for row in TABLE if isinstance(row, Rule)]


def smallest(row: Conflict) -> dict[str, Any]:
    """Return the few keys that meet a row's conditions, and what these keys need themselves."""
    values = {"micro_batch_size": 1, **NEEDS.get((row.asked.key, row.other.key), {})}
    for condition in (row.asked, row.other, row.also):
        if condition is not None:
            candidates = VALUES.get(condition.key, (0, 2))
            values[condition.key] = next(v for v in candidates if condition.holds(v))
    return values


def refused_with(values: dict[str, Any], row: Conflict | Rule) -> str:
    """Return the message with which these keys are refused where the row is asked first."""
    values = {"micro_batch_size": 1, **values}
    with pytest.raises(ConfigError) as error:  # noqa: PT012
        # Its keys alone are no mistake: a preset sets them, and a dry run has other ranks
        if row.typed:
            refuse(make_config(values), typed=row.keys)
        elif isinstance(row, Rule) and "workers" in row.keys:
            refuse_sharing(make_config(values), values["workers"])
        else:
            make_config(values)
    return str(error.value)


def name_of(row: Conflict) -> str:
    return f"{row.asked.words}, {row.other.words}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_row_is_reached_and_says_its_message(row: Conflict) -> None:
    values = smallest(row)
    message = refused_with(values, row)
    asked = spell(Config.model_construct(**values), row.asked.key)
    assert message.startswith(f"{asked} ")
    assert row.other_words or f"{row.other.key} = " in message
    assert row.why in message
    assert message.endswith(f"; {row.remedy}")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.words)
def test_every_rule_of_arithmetic_is_reached(rule: Rule) -> None:
    values, part = BROKEN[rule.find.__name__]
    assert part in refused_with(values, rule)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp_mode": "ddp"}, ["--mirror", "off"]),
        ({"dp_mode": "zero1", "replicas": 2}, ["--mirror", "off"]),
        ({"recovery": "restart"}, ["--spares", "0"]),
    ],
)
def test_off_is_accepted_where_it_is_off_already(
    values: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    flags = [f"--{key}={value}" for key, value in values.items()]
    given = parse_args([*flags, *words], "x", "y").config
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    file = tmp_path / "mine.yaml"
    lines = [f"{key.removeprefix('--')}: {value}\n" for key, value in pairs.items()]
    file.write_text("".join(lines) + "".join(f"{key}: {values[key]}\n" for key in values))
    from_file = load_config(str(file), "tiny")
    for config in (given, from_file):
        assert config.model_dump().items() >= values.items()


# ---- groups --------------------------------------------------------------------------------------


def test_each_group_refuses_what_is_wrong_within_it() -> None:
    for values, key in (
        ({"n_head": 3}, "n_embd"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"comm_trace": "every"}, "comm_trace"),
        ({"profile": "8:5"}, "profile"),
        ({"micro_batch_size": 0}, "no batch size"),
    ):
        with pytest.raises(ConfigError, match=key):
            make_config({"micro_batch_size": 1, **values})


# ---- early and late ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comm_trace", "always"),
        ("allreduce", "ring"),
        ("grad_compress", "bf16"),
        ("audit_every", 4),
    ],
)
def test_one_rank_has_one_answer_early_and_late(key: str, value: Any) -> None:
    """Whether `workers = 1` is written or follows from the machine."""
    values = {"dp_mode": "ddp" if key == "allreduce" else "ddp_by_hand", key: value}
    config = load_config(preset="tiny", overrides=values)
    assert first(config, ranks=2) is None
    late = first(config, ranks=1)
    assert late.startswith(f"{key} = {value} would be ignored: there is only one rank; ")
    assert f"--{key} " in late
    with pytest.raises(ConfigError) as early:
        load_config(preset="tiny", overrides={**values, "workers": 1})
    assert str(early.value) == late


@pytest.mark.parametrize("key", ["comm_trace", "allreduce", "grad_compress", "audit_every"])
def test_a_plan_for_one_rank_refuses_what_needs_two_also_in_a_resumed_run(
    key: str, tmp_path: Path
) -> None:
    """Of a dry run and of a start. The message has the flag with which the run can go on."""
    value = {"comm_trace": "always", "allreduce": "ring", "grad_compress": "bf16"}.get(key, 4)
    mode = "ddp" if key == "allreduce" else "ddp_by_hand"
    ran = load_config(preset="tiny", overrides={"dp_mode": mode, key: value, "workers": 2})
    (tmp_path / "config.json").write_text(ran.to_json())
    dataset = DatasetInfo("text", "", tmp_path, "uint16", 65, 6_400, 640, "", "", {}, "tokens")

    resumed = parse_args(["--resume", str(tmp_path)], "prog", "what")
    plan(resumed, Layout(dp=2), dataset)
    with pytest.raises(ConfigError, match=f"only one rank; .* or use --{key} ") as refused:
        plan(resumed, Layout(), dataset)

    idle = str(refused.value).rsplit(" ", 1)[-1]
    again = parse_args(["--resume", str(tmp_path), f"--{key}", idle], "prog", "what")
    plan(again, Layout(), dataset)


def test_a_group_that_has_shrunk_to_one_rank_keeps_its_configuration() -> None:
    """Ranks get the configuration of the run, whose `workers` stays what was asked for."""
    values = {"dp_mode": "ddp_by_hand", "grad_compress": "bf16", "workers": 2}
    config = load_config(preset="tiny", overrides=values)
    assert Config(**config.model_dump()) == config


def test_a_device_that_is_found_later_has_the_answer_of_one_that_is_asked_for() -> None:
    values = {"attention": "flash", "audit_every": 4}
    config = load_config(preset="tiny", overrides=values)
    assert first(config) is None
    assert first(config, device="cpu") is None
    late = first(config, device="cuda")
    assert "attention = flash: on a GPU" in late
    with pytest.raises(ConfigError) as early:
        load_config(preset="tiny", overrides={**values, "device": "cuda"})
    assert str(early.value) == late
