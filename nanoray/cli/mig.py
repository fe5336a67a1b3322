"""`nanoray check mig plan|show`: the MIG profiles of a card, and the slices of this machine.

plan   every profile of a card: how many fit, SMs, memory, bandwidth, peak
show   the GPUs and slices that NVML finds, and the environment variable that passes slices to Ray

Neither command changes the MIG mode: the commands to do so are printed for an administrator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from nanoray.cli import name_program, run_subcommand, tool_parser
from nanoray.errors import ConfigError
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.mig import MIG_SHAPES, mig_commands, profile_name
from nanoray.machine.peaks import peak_bandwidth, peak_flops

# Cards that have the six profiles of MIG_SHAPES, as NVML names them -> the GB in their profiles'
# names.
CARDS = {
    "NVIDIA A100-SXM4-40GB": 40,
    "NVIDIA A100-PCIE-40GB": 40,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA H100 80GB HBM3": 80,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
    "NVIDIA H200": 141,
    "NVIDIA H200 NVL": 141,
    "NVIDIA B200": 180,
}
# SMs of the whole card outside MIG mode (the data sheet's peak is for these) and of the six
# profiles, as listed by `nvidia-smi mig -lgip`. On an H100 "1g" does not fix the SMs: a 1g slice
# has 16 with one eighth of the memory and 26 with two, and seven of the smaller leave 20 of 132 SMs
# idle. SMs of other cards are counted when a slice runs.
SMS = {
    "NVIDIA A100": (108, (14, 14, 28, 42, 56, 98)),
    "NVIDIA H100 80GB HBM3": (132, (16, 26, 32, 60, 64, 132)),
}
# Header and width of each column after the profile's name.
HEADERS = (
    ("fits", 5),
    ("SMs", 6),
    ("GiB", 7),
    ("GB/s", 7),
    ("TFLOP/s", 9),
)
UNDO_COMMAND = (
    "sudo nvidia-smi mig -i 0 -dci && sudo nvidia-smi mig -i 0 -dgi && sudo nvidia-smi -i 0 -mig 0"
)


class MigProfile(NamedTuple):
    """One MIG profile of a card: an example slice, how many fit, and its SMs (None: not known)."""

    slice: Device
    fit: int
    sms: int | None

    @property
    def shares(self) -> str:
        """Describe the compute and the bandwidth of all fitting slices, as shares of the card."""
        card_sms, _ = _sms(self.slice.name)
        if card_sms:
            compute = f"{self.sms}/{card_sms} SMs"
        else:
            compute = f"{self.slice.compute_fraction * 7:.0f}/7 compute"
        bandwidth = f"{self.slice.bandwidth_fraction * 8:.0f}/8 bandwidth"
        return f"{self.fit}·{compute}, {self.fit}·{bandwidth}"


def _sms(name: str) -> tuple[int, tuple[int | None, ...]]:
    """Return the SMs of a card and of its six profiles; 0 and None where they are not known.

    `name` is that of the card or of one of its slices.
    """
    card = name.partition(" MIG ")[0]
    for prefix, sms in SMS.items():
        if card.startswith(prefix):
            return sms
    return 0, (None,) * len(MIG_SHAPES)


def plan(card: str) -> list[MigProfile]:
    """Return the six profiles of a card, smallest first. Source: NVIDIA's MIG User Guide."""
    card_gb = CARDS[card]
    card_sms, profile_sms = _sms(card)
    profiles = []
    for (shape, fit), sms in zip(MIG_SHAPES.items(), profile_sms, strict=True):
        compute, memory = shape  # in sevenths and eighths of the card
        name = profile_name(card_gb, compute, memory)
        # SMs are exact. Sevenths overstate the small profiles of an H100, which leave SMs idle.
        compute_fraction = sms / card_sms if sms else compute / 7
        example = Device(
            kind="mig",
            index=0,
            uuid="",
            name=f"{card} MIG {name}",
            memory_bytes=(card_gb << 30) * memory // 8,
            parent_uuid="",
            profile=name,
            compute_fraction=compute_fraction,
            bandwidth_fraction=memory / 8,
            bf16=True,
        )
        profiles.append(MigProfile(example, fit, sms))
    return profiles


def compute_fraction_of(device: Device) -> float:
    """Return a device's share of its card's FLOP/s: by SMs where known, else by its profile."""
    card = device.name.partition(" MIG ")[0]
    if card in CARDS:
        for profile in plan(card):
            if profile.slice.name == device.name:
                return profile.slice.compute_fraction
    return device.compute_fraction


def peaks(device: Device) -> dict[str, float]:
    """Return a device's peak FLOP/s and bandwidth in its training precision, {} if not known."""
    device = replace(device, compute_fraction=compute_fraction_of(device))
    flops = peak_flops(device, "bf16" if device.bf16 else "fp32")
    bytes_per_s = peak_bandwidth(device)
    if not flops or not bytes_per_s:
        return {}
    return {"peak_tflops": flops / 1e12, "peak_gbps": bytes_per_s / 1e9}


def peak_text(known: dict[str, Any]) -> str:
    """Format the values of `peaks`."""
    if "peak_gbps" not in known:
        return "no peak known"
    return f"peak {known['peak_tflops']:.0f} TFLOP/s, {known['peak_gbps']:.0f} GB/s"


# The commands.


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands and return its exit code."""
    return run_subcommand({"plan": _plan, "show": _show}, argv, __doc__)


def _plan(argv: list[str]) -> int:
    parser = tool_parser(name_program("check mig plan"), "show the MIG profiles of a card")
    parser.add_argument(
        "--card", default="", help=f"as NVML names it: {', '.join(CARDS)} [the first GPU here]"
    )
    args = parser.parse_args(argv)
    print("\n".join(plan_lines(args.card or _first_card_here())))
    return 0


def _first_card_here() -> str:
    """Return the name of this machine's first GPU with MIG. Raises ConfigError without one."""
    gpu_names = [device.name for device in discover_gpus() if device.kind == "cuda"]
    for name in gpu_names:
        if name in CARDS:
            return name
    found = f"found {', '.join(gpu_names)}" if gpu_names else "no GPU found"
    example = next(iter(CARDS))
    raise ConfigError(
        f"{found}; name a card with MIG: --card {example!r}, or one of {', '.join(CARDS)}"
    )


def plan_lines(card: str) -> list[str]:
    """Return the table of a card's profiles and the commands that make and remove slices.

    Raises ConfigError for a card that is not known.
    """
    if card not in CARDS:
        raise ConfigError(f"{card!r} is not known to have MIG; one of {', '.join(CARDS)}")
    whole_card = Device("cuda", 0, "", card, CARDS[card] << 30, "", bf16=True)
    profiles = plan(card)

    # The caption and the header.
    header = f"{'profile':<11}" + "".join(f"{name:>{width}}" for name, width in HEADERS)
    table = [
        f"card   {card}: {peak_text(peaks(whole_card))} in bf16",
        f"{header}  of the card",
    ]

    for profile in profiles:
        example = profile.slice
        known = peaks(example)
        table.append(
            f"{example.profile:<11}"
            f"{profile.fit:>5}"
            f"{profile.sms or '?':>6}"
            f"{example.memory_bytes / 2**30:>7.1f}"
            f"{known['peak_gbps']:>7.0f}"
            f"{known['peak_tflops']:>9.0f}"
            f"  {profile.shares}"
        )

    # Both 1g profiles are printed, because they differ in memory and so in what trains in them.
    table.append("")
    for profile in profiles[:2]:
        table.append(mig_commands(whole_card, profile.fit))
    table.append(f"undo   {UNDO_COMMAND}")
    table.append("on Kubernetes: kuberay/scripts/mig.sh NODE all-PROFILE")
    return table


def _show(argv: list[str]) -> int:
    parser = tool_parser(name_program("check mig show"), "GPUs and slices of this machine")
    parser.parse_args(argv)
    print("\n".join(show_lines(discover_gpus())))
    return 0


def show_lines(devices: list[Device]) -> list[str]:
    """Return a line for each GPU and slice, and the command that passes the slices to Ray."""
    if not devices:
        return [
            "no GPU found: NVML does not answer here; `nanoray check mig plan --card ...` needs none"
        ]

    slices = [device for device in devices if device.kind == "mig"]
    output = []
    for gpu in devices:
        if gpu.kind != "cuda":
            continue
        state = "in MIG mode" if gpu.mig_mode else "whole"
        memory_gib = gpu.memory_bytes / 2**30
        output.append(f"GPU {gpu.index}  {gpu.name} {gpu.uuid} · {memory_gib:.0f} GiB · {state}")
        own_slices = [device for device in slices if device.parent_uuid == gpu.uuid]
        for device in own_slices:
            output.append(
                f"  {device.profile or '?':<9} {device.uuid} · "
                f"{device.memory_bytes / 2**30:.1f} GiB · {peak_text(peaks(device))}"
            )
        # A GPU in MIG mode without slices can compute nothing, so it always gets the commands.
        needs_slices = gpu.mig_mode and not own_slices
        could_be_cut = not gpu.mig_mode and gpu.name in CARDS
        if needs_slices:
            output.append(f"  no slice yet; {mig_commands(gpu)}")
        elif could_be_cut:
            output.append(f"  {mig_commands(gpu)}")

    if slices:
        uuids = ",".join(device.uuid for device in slices)
        output.append("Ray does not detect slices; name them when you start it:")
        output.append(f"  CUDA_VISIBLE_DEVICES={uuids} ray start --head --num-gpus={len(slices)}")
        output.append("or let nanoray start Ray: python -m nanoray.launch --device mig")
    return output


if __name__ == "__main__":
    raise SystemExit(main())
