"""`nanoray mig plan|show`: what a card can be cut into, what each slice gets, and what is cut here now.

plan   every profile of a card: how many fit, SMs, memory, bandwidth, peak, and the training speed to expect
show   the GPUs and slices that NVML finds, and the environment that hands the slices to Ray

Nothing here changes the MIG mode: the commands are printed, and running them is the administrator's decision.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

from nanoray.config import load_config
from nanoray.devices import (
    MIG_SHAPES,
    Device,
    discover_gpus,
    mig_commands,
    peak_bandwidth,
    peak_flops,
    profile_name,
)
from nanoray.errors import ConfigError
from nanoray.report import run_subcommand

# Cards that have the six profiles of MIG_SHAPES, as NVML names them -> GB by which the profiles are named.
CARDS = {"NVIDIA A100-SXM4-40GB": 40, "NVIDIA A100-PCIE-40GB": 40, "NVIDIA A100-SXM4-80GB": 80}
CARDS |= {"NVIDIA A100 80GB PCIe": 80, "NVIDIA H100 80GB HBM3": 80, "NVIDIA H100 PCIe": 80, "NVIDIA H100 NVL": 94}
CARDS |= {"NVIDIA H200": 141, "NVIDIA H200 NVL": 141, "NVIDIA B200": 180}
# SMs of the whole card out of MIG mode, whose peak the data sheet has, and of the six, as `nvidia-smi mig -lgip` lists
# them. On an H100 "1g" is a name: with one eighth of the memory it has 16 SMs, with two 26, so its bandwidth does not
# come alone; seven of the first leave 20 of 132 SMs idle. Other cards' SMs are counted where a slice runs.
SMS = {"NVIDIA A100": (108, (14, 14, 28, 42, 56, 98)), "NVIDIA H100 80GB HBM3": (132, (16, 26, 32, 60, 64, 132))}
VOCAB_SIZE = 50304  # GPT-2's, padded; for the parameters of the preset's model
MFU = 0.35  # of a small GPT in bf16 on one GPU; what --mfu replaces


class Profile(NamedTuple):
    """One way to cut a card: a slice that need not exist, how many of it fit, and its SMs where they are known."""

    slice: Device
    fit: int
    sms: int | None

    @property
    def shares(self) -> str:
        """What all that fit have of the card, in words; without known SMs compute is counted in its name's sevenths."""
        whole, _ = _sms(self.slice.name)
        compute = f"{self.sms}/{whole} SMs" if whole else f"{self.slice.compute_fraction * 7:.0f}/7 compute"
        return f"{self.fit}·{compute}, {self.fit}·{self.slice.bandwidth_fraction * 8:.0f}/8 bandwidth"


def _sms(name: str) -> tuple[int, tuple[int | None, ...]]:
    """Return the SMs of a card, or of the card of a slice, and those of its six profiles; (0, Nones): not known."""
    card = name.partition(" MIG ")[0]
    return next((known for prefix, known in SMS.items() if card.startswith(prefix)), (0, (None,) * len(MIG_SHAPES)))


def plan(card: str) -> list[Profile]:
    """Return the six profiles of a card, smallest first. Source: NVIDIA's MIG User Guide."""
    gb = CARDS[card]
    whole, sms = _sms(card)
    profiles = []
    for ((compute, memory), fit), count in zip(MIG_SHAPES.items(), sms, strict=True):
        name, shares = profile_name(gb, compute, memory), (count / whole if count else compute / 7, memory / 8)
        part = Device("mig", 0, "", f"{card} MIG {name}", (gb << 30) * memory // 8, "", name, *shares, bf16=True)
        profiles.append(Profile(part, fit, count))
    return profiles


def compute_share(device: Device) -> float:
    """Return the share of its card's FLOP/s that a device has: of its SMs where they are known, or as its name says."""
    card = device.name.partition(" MIG ")[0]
    known = {p.slice.name: p.slice.compute_fraction for p in plan(card)} if card in CARDS else {}
    return known.get(device.name, device.compute_fraction)


def peaks(device: Device) -> dict[str, float]:
    """Return what a device, or its slice of a card, can reach in the precision it trains in; {} when not known."""
    device = replace(device, compute_fraction=compute_share(device))
    flops, bytes_per_s = peak_flops(device, "bf16" if device.bf16 else "fp32"), peak_bandwidth(device)
    return {"peak_tflops": flops / 1e12, "peak_gbps": bytes_per_s / 1e9} if flops and bytes_per_s else {}


def peak_text(known: dict[str, Any]) -> str:
    if "peak_gbps" not in known:
        return "no peak known"
    return f"peak {known['peak_tflops']:.0f} TFLOP/s, {known['peak_gbps']:.0f} GB/s"


# The commands.


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands and return its exit code."""
    return run_subcommand({"plan": _plan, "show": _show}, argv, __doc__)


def _plan(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="nanoray mig plan", description="what a card can be cut into")
    parser.add_argument("--card", default="", help=f"as NVML names it: {', '.join(CARDS)} [the first GPU here]")
    parser.add_argument("--preset", default="gpt2-124m", help="whose model's speed is predicted [gpt2-124m]")
    parser.add_argument("--mfu", type=float, default=MFU, help=f"share of a slice's peak that training reaches [{MFU}]")
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
        raise ConfigError(f"{found}; name a card with MIG: --card {next(iter(CARDS))!r}, or one of {', '.join(CARDS)}")
    return known[0]


def plan_lines(card: str, preset: str, mfu: float) -> list[str]:
    """Return the table of a card's profiles. Raises ConfigError for a card or a preset that is not known."""
    from nanoray.model import ModelShape, flops_per_token  # torch, seconds later

    if card not in CARDS:
        raise ConfigError(f"{card!r} is not known to have MIG; one of {', '.join(CARDS)}")
    flops = flops_per_token(ModelShape.of(load_config(None, preset), VOCAB_SIZE))
    whole = Device("cuda", 0, "", card, CARDS[card] << 30, "", bf16=True)
    heads = (("fits", 5), ("SMs", 6), ("GiB", 7), ("GB/s", 7), ("TFLOP/s", 9), ("tok/s, one", 13), ("tok/s, all", 13))
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
    lines += ["", *(mig_commands(whole, p.fit) for p in plan(card)[:2]), "undo   sudo nvidia-smi mig -i 0 -dci && "]
    lines[-1] += "sudo nvidia-smi mig -i 0 -dgi && sudo nvidia-smi -i 0 -mig 0"
    lines.append("on Kubernetes: kuberay/scripts/mig.sh NODE all-PROFILE")
    return lines


def _show(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="nanoray mig show", description="GPUs and slices of this machine").parse_args(argv)
    print("\n".join(show_lines(discover_gpus())))
    return 0


def show_lines(found: list[Device]) -> list[str]:
    """Return a line per GPU and slice, and how the slices are handed to Ray."""
    if not found:
        return ["no GPU found: NVML does not answer here; `nanoray mig plan --card ...` needs none"]
    lines = []
    for gpu in (device for device in found if device.kind == "cuda"):
        state = "in MIG mode" if gpu.mig_mode else "whole"
        lines.append(f"GPU {gpu.index}  {gpu.name} {gpu.uuid} · {gpu.memory_bytes / 2**30:.0f} GiB · {state}")
        slices = [device for device in found if device.kind == "mig" and device.parent_uuid == gpu.uuid]
        lines += [
            f"  {part.profile or '?':<9} {part.uuid} · {part.memory_bytes / 2**30:.1f} GiB · {peak_text(peaks(part))}"
            for part in slices
        ]
        if gpu.mig_mode and not slices:
            lines.append(f"  no slice yet; {mig_commands(gpu)}")
        elif not gpu.mig_mode and gpu.name in CARDS:
            lines.append(f"  {mig_commands(gpu)}")
    uuids = [device.uuid for device in found if device.kind == "mig"]
    if uuids:
        lines.append("Ray does not find slices by itself; hand them over:")
        lines.append(f"  CUDA_VISIBLE_DEVICES={','.join(uuids)} ray start --head --num-gpus={len(uuids)}")
        lines.append("or let nanoray start Ray: python -m nanoray.launch --device mig")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
