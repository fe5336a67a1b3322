"""Statistics of each layer on every K-th step.

They cover weights, gradients, updates and activations. The instrument runs on
rank 0 alone and communicates nothing, so that no bit of the training changes. Hooks see the first
micro batch; gradients are those of all ranks, before clipping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.faults.progress import AFTER_UPDATE
from nanoray.models.gpt import LMHead
from nanoray.observe.watch.dangers import FILE, dangers
from nanoray.observe.watch.record_files import JsonlWriter


class Statistics:
    """The instrument that writes statistics.jsonl, and warns once of each danger."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        scale: Callable[[Tensor], Tensor],
        note: Callable[[str], None],
    ) -> None:
        """`scale` applies the loss scale that gradients have."""
        self._every = config.statistics_every
        self._hooks = not config.compile  # hooks inside of compiled layers do not run
        self._model = model
        self._scale = scale
        self._note = note
        self._handles: list[Any] = []
        self._layers: dict[str, dict[str, Tensor]] = {}  # the values of the present step
        self._before: dict[str, Tensor] = {}  # the weights before its update
        self._step = 0
        self._cost_s = 0.0
        self._warned: set[str] = set()
        self._file: JsonlWriter | None = None

    def begin(self, folder: Path, step: int) -> bool:
        """Begin in a group of ranks at `step`, and drop an unfinished step. (rank 0 only)

        Returns whether statistics are wanted.
        """
        if not self._every:
            return False
        self._drop()
        if self._file is None:
            self._file = JsonlWriter(folder / FILE, step)
            if not self._hooks:
                self._note("note    statistics leave activations out: the layers are compiled")
        return True

    def phase(self, step: int, phase: str) -> None:
        """Measure the steps that are due, at the beginnings of their phases."""
        began = time.perf_counter()
        if self._before:
            if step == self._step + 1 or (step == self._step and phase in AFTER_UPDATE):
                self._finish(began)
            elif phase != "optimizer":  # the step is done again
                self._drop()
        if step % self._every:
            return
        if phase == "data" and not self._handles and not self._layers and self._hooks:
            # Before this rank's own forward, and after that of an audited micro batch
            self._attach()
        elif phase == "optimizer":
            self._measure_gradients(step)
        else:
            return
        self._cost_s += time.perf_counter() - began

    def _drop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._layers = {}
        self._before = {}
        self._cost_s = 0.0

    def _attach(self) -> None:
        """Watch the first call of each layer."""
        for name, module in self._model.named_modules():
            layer = layer_of(name)
            is_layer = bool(name) and name == layer and not isinstance(module, LMHead)
            if is_layer and next(module.parameters(), None) is not None:
                self._watch(module, layer)

    def _watch(self, module: nn.Module, layer: str) -> None:
        seen = list[bool]()

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if seen or not module.training:
                return
            seen.append(True)
            began = time.perf_counter()
            # A layer of experts also returns its routing.
            if isinstance(output, tuple):
                output = output[0]
            with torch.autocast(output.device.type, enabled=False):
                squares = output.detach().float().square()
                self._layers.setdefault(layer, {})["activation_rms"] = squares.mean().sqrt()
            self._cost_s += time.perf_counter() - began

        self._handles.append(module.register_forward_hook(hook))

    @torch.no_grad()
    def _measure_gradients(self, step: int) -> None:
        """Measure the gradients as backward has left them, and keep the weights."""
        while self._handles:
            self._handles.pop().remove()
        self._step = step
        device = next(self._model.parameters()).device
        scale = self._scale(torch.ones((), device=device))
        for layer, named in self._parameters().items():
            grads = [p.grad.float() / scale for _, p in named if p.grad is not None]
            own = self._layers.setdefault(layer, {})
            own["weight_rms"] = rms([p.float() for _, p in named])
            own["grad_rms"] = rms(grads)
            self._before |= {name: p.detach().clone() for name, p in named}

    def _parameters(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        layers: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, p in self._model.named_parameters():
            layers.setdefault(layer_of(name), []).append((name, p))
        return layers

    @torch.no_grad()
    def _finish(self, began: float) -> None:
        """Compare the weights with those before the update, write the record, and warn."""
        for layer, named in self._parameters().items():
            moved = rms([p.float() - self._before[name].float() for name, p in named])
            values = self._layers[layer]
            values["update_ratio"] = moved / values["weight_rms"].clamp(min=1e-30)

        # Now the host waits for the device.
        layers = {}
        for layer, values in self._layers.items():
            layers[layer] = {key: rounded(value.item()) for key, value in values.items()}
        cost_ms = round(1e3 * (self._cost_s + time.perf_counter() - began), 3)
        self._drop()
        assert self._file
        try:
            if self._file.last_step >= self._step:
                self._file.rewind(self._step - 1)
            self._file.on_record({"step": self._step, "cost_ms": cost_ms, "layers": layers})
        except OSError as error:
            self._warn(
                "disk", f"{FILE} cannot be written ({error.strerror}); its records wait in memory"
            )
        for kind, text in dangers(layers).items():
            self._warn(
                kind, f"{kind} at step {self._step}: {text}; `nanoray inspect RUN` shows all layers"
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._note(f"warning  {text}")


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3`, or the first part of its name."""
    parts = name.split(".")
    if len(parts) > 1 and parts[1].isdigit():
        return f"{parts[0]}.{parts[1]}"
    return parts[0]


def rms(tensors: list[Tensor]) -> Tensor:
    """Return the root mean square of all elements of some tensors, 0 of none."""
    count = sum(t.numel() for t in tensors)
    if not count:
        return torch.zeros(())
    squares = torch.stack([t.square().sum() for t in tensors])
    return squares.sum().div(count).sqrt()


def rounded(value: float) -> float | None:
    """Return six digits of a value; None where it is not finite: JSON has no word for NaN."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
