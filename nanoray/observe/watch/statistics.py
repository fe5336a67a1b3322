"""Statistics of each layer on every K-th step.

They cover weights, gradients, updates, activations, attention and dead units. The instrument runs on
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
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.faults.progress import AFTER_UPDATE
from nanoray.models.gpt import MLP, Attention, LMHead
from nanoray.models.kernels import rotate
from nanoray.observe.watch.dangers import FILE, dangers
from nanoray.observe.watch.record_files import JsonlWriter

# A hidden unit none of whose outputs is further from 0 than this, over a micro batch, is dead
DEAD = 1e-3


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
                self._note(
                    "note    statistics leave activations, attention and dead units out: the "
                    "layers are compiled"
                )
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
        """Watch the first call of each layer, of each attention, and of each MLP's hidden units."""
        for name, module in self._model.named_modules():
            layer = layer_of(name)
            is_layer = bool(name) and name == layer and not isinstance(module, LMHead)
            if is_layer and next(module.parameters(), None) is not None:
                self._watch(module, layer, activation_rms)
            if isinstance(module, Attention):
                self._watch(
                    module.qkv, layer, lambda _, y, attention=module: attention_of(attention, y)
                )
            elif isinstance(module, MLP):
                self._watch(
                    module.up, layer, lambda _, y, form=module.gelu: {"dead": dead_percent(y, form)}
                )

    def _watch(
        self, module: nn.Module, layer: str, measure: Callable[..., dict[str, Tensor]]
    ) -> None:
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
                self._layers.setdefault(layer, {}).update(measure(module, output.detach()))
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


def activation_rms(module: nn.Module, y: Tensor) -> dict[str, Tensor]:
    """Return the root mean square of a layer's output."""
    return {"activation_rms": y.float().square().mean().sqrt()}


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


def attention_of(attention: Attention, qkv: Tensor) -> dict[str, Tensor]:
    """Return entropy and largest logit of a micro batch's first sequence, given qkv (B, T, 3C).

    The entropy of a query is divided by its largest possible one, the logarithm of the number of
    positions that it sees. The mean over all queries is returned.
    """
    T = qkv.shape[1]
    q, k, _ = (
        y[:1].float().view(1, T, -1, attention.head_dim).transpose(1, 2) for y in qkv.chunk(3, -1)
    )  # (1, H, T, head_dim)
    if attention.rotary:
        q = rotate(q)
        k = rotate(k)
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) * attention.head_dim**-0.5  # (1, H, T, T)
    scores = scores.masked_fill(later, -math.inf)
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)[..., 1:]  # the first query sees one position
    largest = torch.arange(2, T + 1, device=q.device).log()
    share = (entropy / largest).mean() if T > 1 else scores.new_ones(())
    return {"max_logit": scores.max(), "attention_entropy": share}


def dead_percent(hidden: Tensor, gelu: str = "none") -> Tensor:
    """Return the share in % of an MLP's hidden units (..., 4C), before GELU, that are dead.

    gelu: torch's word for its form.
    """
    largest = F.gelu(hidden.float(), approximate=gelu).abs().flatten(0, -2).amax(0)  # (4C,)
    return 100.0 * (largest < DEAD).float().mean()
