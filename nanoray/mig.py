"""`nanoray mig plan|show`: the MIG profiles of a card, and the slices of this machine.

plan   every profile of a card: how many fit, SMs, memory, bandwidth, peak, and the predicted training speed
show   the GPUs and slices that NVML finds, and the environment variable that passes the slices to Ray

Neither command changes the MIG mode: the commands to do so are printed for an administrator.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

from nanoray.cli import run_subcommand
from nanoray.config import load_config
from nanoray.devices.device import Device
from nanoray.devices.gpus import discover_gpus
from nanoray.devices.mig import MIG_SHAPES, mig_commands, profile_name
from nanoray.devices.peaks import peak_bandwidth, peak_flops
from nanoray.errors import ConfigError

# Cards that have the six profiles of MIG_SHAPES, by NVML's name -> the memory in GB that names
# their profiles.
CARDS = {"NVIDIA A100-SXM4-40GB": 40, "NVIDIA A100-PCIE-40GB": 40, "NVIDIA A100-SXM4-80GB": 80}
CARDS |= {
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
}
CARDS |= {"NVIDIA H200": 141, "NVIDIA H200 NVL": 141, "NVIDIA B200": 180}
# SMs of the whole card outside MIG mode (the data sheet's peak is for these) and of the six
# profiles, as listed by `nvidia-smi mig -lgip`. On an H100 "1g" does not fix the SMs: a 1g slice
# has 16 with one eighth of the memory and 26 with two, and seven of the smaller leave 20 of 132 SMs
# idle. SMs of other cards are counted when a slice runs.
SMS = {
    "NVIDIA A100": (108, (14, 14, 28, 42, 56, 98)),
    "NVIDIA H100 80GB HBM3": (132, (16, 26, 32, 60, 64, 132)),
}
VOCAB_SIZE = 50304  # GPT-2's, padded; for the parameters of the preset's model
MFU = 0.35  # default of --mfu: a small GPT in bf16 on one GPU


class Profile(NamedTuple):
    """One MIG profile of a card: an example slice, how many fit on the card, and its SMs (None: not
    known).
    """

    slice: Device
    fit: int
    sms: int | None

    @property
    def shares(self) -> str:
        """Describe the share of the card that all fitting slices have together, in SMs or in
        sevenths of compute.
        """
        whole, _ = _sms(self.slice.name)
        compute = (
            f"{self.sms}/{whole} SMs"
            if whole
            else f"{self.slice.compute_fraction * 7:.0f}/7 compute"
        )
        return (
            f"{self.fit}·{compute}, {self.fit}·{self.slice.bandwidth_fraction * 8:.0f}/8 bandwidth"
        )


def _sms(name: str) -> tuple[int, tuple[int | None, ...]]:
    """Return the SMs of a card (or of a slice's card) and of its six profiles; 0 and None where not
    known.
    """
    card = name.partition(" MIG ")[0]
    return next(
        (known for prefix, known in SMS.items() if card.startswith(prefix)),
        (0, (None,) * len(MIG_SHAPES)),
    )


def plan(card: str) -> list[Profile]:
    """Return the six profiles of a card, smallest first. Source: NVIDIA's MIG User Guide."""
    gb = CARDS[card]
    whole, sms = _sms(card)
    profiles = []
    for ((compute, memory), fit), count in zip(MIG_SHAPES.items(), sms, strict=True):
        name, shares = (
            profile_name(gb, compute, memory),
            (count / whole if count else compute / 7, memory / 8),
        )
        part = Device(
            "mig",
            0,
            "",
            f"{card} MIG {name}",
            (gb << 30) * memory // 8,
            "",
            name,
            *shares,
            bf16=True,
        )
        profiles.append(Profile(part, fit, count))
    return profiles


def compute_share(device: Device) -> float:
    """Return a device's share of its card's FLOP/s: by SMs where they are known, else by its
    profile's name.
    """
    card = device.name.partition(" MIG ")[0]
    known = {p.slice.name: p.slice.compute_fraction for p in plan(card)} if card in CARDS else {}
    return known.get(device.name, device.compute_fraction)


def peaks(device: Device) -> dict[str, float]:
    """Return the peak FLOP/s and bandwidth of a device in the precision it trains in, {} when not
    known.
    """
    device = replace(device, compute_fraction=compute_share(device))
    flops, bytes_per_s = (
        peak_flops(device, "bf16" if device.bf16 else "fp32"),
        peak_bandwidth(device),
    )
    return (
        {"peak_tflops": flops / 1e12, "peak_gbps": bytes_per_s / 1e9}
        if flops and bytes_per_s
        else {}
    )


def peak_text(known: dict[str, Any]) -> str:
    if "peak_gbps" not in known:
        return "no peak known"
    return f"peak {known['peak_tflops']:.0f} TFLOP/s, {known['peak_gbps']:.0f} GB/s"


# The commands.


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands and return its exit code."""
    return run_subcommand({"plan": _plan, "show": _show}, argv, __doc__)


def _plan(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="nanoray mig plan", description="show the MIG profiles of a card"
    )
    parser.add_argument(
        "--card", default="", help=f"as NVML names it: {', '.join(CARDS)} [the first GPU here]"
    )
    parser.add_argument(
        "--preset", default="gpt2-124m", help="preset whose model's speed is predicted [gpt2-124m]"
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=MFU,
        help=f"share of a slice's peak that training reaches [{MFU}]",
    )
    args = parser.parse_args(argv)
    if not 0 < args.mfu <= 1:
        raise ConfigError(f"mfu = {args.mfu} is no share; give a number above 0 and up to 1")
    print("\n".join(plan_lines(args.card or _card_here(), args.preset, args.mfu)))
    return 0


def _card_here() -> str:
    cards = [device.name for device in discover_gpus() if device.kind == "cuda"]
    known = [name for name in cards if name in CARDS]
    if not known:
        found = f"found {', '.join(cards)}" if cards else "no GPU found"
        raise ConfigError(
            f"{found}; name a card with MIG: --card {next(iter(CARDS))!r}, or one of "
            f"{', '.join(CARDS)}"
        )
    return known[0]


def plan_lines(card: str, preset: str, mfu: float) -> list[str]:
    """Return the table of a card's profiles. Raises ConfigError for a card or a preset that is not
    known.
    """
    from nanoray.models.costs import flops_per_token
    from nanoray.models.gpt import ModelShape

    if card not in CARDS:
        raise ConfigError(f"{card!r} is not known to have MIG; one of {', '.join(CARDS)}")
    flops = flops_per_token(ModelShape.of(load_config(None, preset), VOCAB_SIZE))
    whole = Device("cuda", 0, "", card, CARDS[card] << 30, "", bf16=True)
    heads = (
        ("fits", 5),
        ("SMs", 6),
        ("GiB", 7),
        ("GB/s", 7),
        ("TFLOP/s", 9),
        ("tok/s, one", 13),
        ("tok/s, all", 13),
    )
    assumed = f"predicted, not measured: {preset} at {100 * mfu:.0f} % MFU"
    lines = [
        f"card   {card}: {peak_text(peaks(whole))} in bf16 · {assumed}",
        f"{'profile':<11}" + "".join(f"{text:>{width}}" for text, width in heads) + "  of the card",
    ]
    for profile in plan(card):
        part, fit, sms = profile
        known = peaks(part)
        speed = 1e12 * known["peak_tflops"] * mfu / flops
        lines.append(
            f"{part.profile:<11}{fit:>5}{sms or '?':>6}{part.memory_bytes / 2**30:>7.1f}{known['peak_gbps']:>7.0f}"
            f"{known['peak_tflops']:>9.0f}{speed:>13,.0f}{fit * speed:>13,.0f}"
            f"  {profile.shares}"
        )
    lines += [
        "",
        *(mig_commands(whole, p.fit) for p in plan(card)[:2]),
        "undo   sudo nvidia-smi mig -i 0 -dci && ",
    ]
    lines[-1] += "sudo nvidia-smi mig -i 0 -dgi && sudo nvidia-smi -i 0 -mig 0"
    lines.append("on Kubernetes: kuberay/scripts/mig.sh NODE all-PROFILE")
    return lines


def _show(argv: list[str]) -> int:
    argparse.ArgumentParser(
        prog="nanoray mig show", description="GPUs and slices of this machine"
    ).parse_args(argv)
    print("\n".join(show_lines(discover_gpus())))
    return 0


def show_lines(found: list[Device]) -> list[str]:
    """Return a line per GPU and slice, and how to pass the slices to Ray."""
    if not found:
        return ["no GPU found: NVML does not answer here; `nanoray mig plan --card ...` needs none"]
    lines = []
    for gpu in (device for device in found if device.kind == "cuda"):
        state = "in MIG mode" if gpu.mig_mode else "whole"
        lines.append(
            f"GPU {gpu.index}  {gpu.name} {gpu.uuid} · {gpu.memory_bytes / 2**30:.0f} GiB · {state}"
        )
        slices = [
            device for device in found if device.kind == "mig" and device.parent_uuid == gpu.uuid
        ]
        lines += [
            f"  {part.profile or '?':<9} {part.uuid} · {part.memory_bytes / 2**30:.1f} GiB · "
            f"{peak_text(peaks(part))}"
            for part in slices
        ]
        if gpu.mig_mode and not slices:
            lines.append(f"  no slice yet; {mig_commands(gpu)}")
        elif not gpu.mig_mode and gpu.name in CARDS:
            lines.append(f"  {mig_commands(gpu)}")
    uuids = [device.uuid for device in found if device.kind == "mig"]
    if uuids:
        lines.append("Ray does not detect slices; name them when you start it:")
        lines.append(
            f"  CUDA_VISIBLE_DEVICES={','.join(uuids)} ray start --head --num-gpus={len(uuids)}"
        )
        lines.append("or let nanoray start Ray: python -m nanoray.launch --device mig")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
