"""Choose precision, attention and compiler for a device, each with its reason."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from nanoray.config import Config
from nanoray.config.conflicts import auto_on_gpus, refuse
from nanoray.errors import ConfigError
from nanoray.machine.device import Device

BF16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})

# --precision auto: narrower layers were not measured, or their casts cost more than bf16
# gains (docs/performance.md).
BF16_MIN_WIDTH = {"flash": 256, "plain": 128}

# --attention auto: the largest block_size at which plain attention was measured
PLAIN_MAX_BLOCK = 256


def choose_precision(
    config: Config, kind: str, features: frozenset[str], bf16_gpu: bool | None = None
) -> tuple[str, str]:
    """Return the precision to train in, and why.

    `bf16_gpu`: whether every GPU of the run has compute capability >= 8; None: unknown. Raises
    ConfigError for a precision that this kind of device does not have.
    """
    refuse(config, device=kind, about=["precision"])
    if config.precision == "tf32" and bf16_gpu is False:
        raise ConfigError(
            "precision = tf32 is a format of newer GPUs, but a GPU is older than compute "
            "capability 8; use precision fp32"
        )
    if config.precision != "auto":
        return config.precision, "asked for"
    if kind != "cpu":
        # GPUs with MIG are all of compute capability 8 or newer, so they multiply bf16.
        if bf16_gpu or (bf16_gpu is None and kind == "mig"):
            return "bf16", "every GPU multiplies bf16, which needs no loss scaler"
        # What does not go with fp16 does not go with an `auto` that becomes fp16. Where the GPUs
        # are not known yet, each rank asks again.
        if bf16_gpu is False:
            refuse(config, precision="fp16", about=["precision"])
        why = "a GPU older than compute capability 8 lacks"
        if bf16_gpu is None:
            why = "no GPU is known to multiply"
        return "fp16", f"{why} bf16; fp16 runs with a loss scaler"
    # Without a measurement the exact precision is the safer choice.
    if config.model != "gpt":
        return "fp32", "the gain of bf16 on a CPU was measured for GPTs only"
    units = sorted(features & BF16_UNITS)
    if not units:
        return "fp32", "this CPU has neither amx_bf16 nor avx512_bf16"
    # Casts cost as much as they gain in narrow layers.
    attention = choose_attention(config, kind, "bf16", features)
    width = BF16_MIN_WIDTH[attention]
    precision = "bf16" if config.n_embd >= width else "fp32"
    return (
        precision,
        f"with {attention} attention {units[0]} pays from width {width} on, and n_embd = "
        f"{config.n_embd}",
    )


def precision_of(
    config: Config, kind: str, devices: Sequence[Device], features: frozenset[str]
) -> tuple[str, str]:
    """Return the precision of a run on all of these devices, and why. Raises ConfigError.

    One GPU without bf16 decides for all ranks, because they train one model. CPUs are no devices.
    """
    bf16_gpu = all(device.bf16 for device in devices) if devices else None
    return choose_precision(config, kind, features, bf16_gpu)


def require_compiler(config: Config, device: str) -> None:
    """Raise ConfigError where `compile` cannot work."""
    refuse(config, device=device.partition(":")[0], about=["compile"])
    if not config.compile:
        return
    why = cannot_compile(device)
    if why:
        raise ConfigError(f"compile = true {why}, or use --compile false")


def cannot_compile(device: str) -> str | None:
    """Return why torch cannot compile for this device, with a remedy; None if it can."""
    if device != "cpu":
        # Triton builds its launchers in C.
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if any(map(shutil.which, names)):
            return None
        return (
            f"needs a C compiler for a GPU, and {' or '.join(names)} is not on the PATH; install "
            "gcc, name another one in CC"
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return (
            f"needs a C++ compiler for a CPU, and {compiler} is not on the PATH; install it, name "
            "another one in CXX"
        )
    # Checked early, because the compiler itself would fail with a long and unrelated error.
    if any(letter.isspace() for letter in sys.prefix):
        return (
            f"cannot work on a CPU from {sys.prefix}: torch passes this path to {compiler} "
            "unquoted, and it has a space; make the environment in another folder"
        )
    return None


def choose_attention(config: Config, kind: str, precision: str, features: frozenset[str]) -> str:
    """Return flash, cudnn or plain; for `auto` the fastest by measurement.

    Raises ConfigError for one that does not run on this kind of device in this precision.
    """
    refuse(config, device=kind, precision=precision, about=["attention"])
    if config.attention != "auto":
        return config.attention
    if kind != "cpu":
        return auto_on_gpus(config)
    # With dropout torch has no fused attention on CPUs, and its plain one has a slower dropout.
    if config.dropout > 0:
        return "plain"
    # In bf16 torch's fused attention takes most of its time in its backward.
    is_fast_bf16 = precision == "bf16" and bool(features & BF16_UNITS)
    if is_fast_bf16 and config.block_size <= PLAIN_MAX_BLOCK:
        return "plain"
    return "flash"
