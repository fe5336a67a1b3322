"""Parameters without a gradient: in a step that no rank computes one, they rest, as in plain torch.

    rank 0   a  b  ·  ·   ┐ the larger byte of all ranks:      a  b  c  ·     d.grad is None: no weight
    rank 1   a  ·  c  ·   ┘ 1 where a rank has a gradient                     decay, no momentum, no step

A model may skip a branch, freeze a tower by no_grad, or have a head that no loss reads. The modes
sum buckets of all parameters, with zeros where this rank has no gradient. A sum of zeros is no
missing gradient: it would let weight decay and momentum move the parameter. So after the last
backward the ranks exchange a byte for each parameter, and gradients that no rank has become None.

Any step may be the first one that skips a parameter, and only the rank that skips it can see that.
But where every rank has all sums, all of them can see whether a sum is zero; and what no rank has
sums up to zero. So in a mode with complete sums, on a CPU, a step in which no sum is zero needs no
exchange, and no rank waits for another one. Elsewhere the exchange is part of every step: a shard of
zeros is seen by its owner alone, and a GPU would have to be waited for. The bytes pass over the
control group, from host to host. nanoray's own models always use all of their parameters, and fsdp
refuses one that does not (even_fsdp.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.script_hooks import unfrozen


class AbsentGradients(StepHook):
    """Takes away the gradients that no rank has computed, before anything reads them."""

    def __init__(self, model: nn.Module, mode: DataParallel, mesh: Mesh) -> None:
        """Watch the trainable parameters of `model`, which `mode` has prepared. (all ranks)"""
        self._mode = mode
        self._mesh = mesh
        self._trained: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                self._trained[name] = p
            else:
                self._frozen[name] = p

        # Whether sums without a zero make the exchange needless. That a frozen parameter trains now,
        # on one rank, is seen by no sum.
        self._sums_suffice = (
            mode.has_complete_sums and mesh.device.type == "cpu" and not self._frozen
        )

    def add_up(self) -> None:
        """Find the parameters that no rank has a gradient of, and set theirs to None. (all ranks)

        It comes before the norm, which is the commit point: once one rank has the norm, all ranks
        have this result, and can finish the step without a lost rank.
        """
        computed = self._mode.computed

        # All ranks have the same sums, to the bit, so all of them skip the exchange, or none does.
        if self._sums_suffice and not any(is_zero(p.grad) for p in self._trained.values()):
            return

        # (all ranks) A byte for each parameter, in the same order on all ranks.
        own = [name in computed for name in self._trained]
        thawed = [p.requires_grad for p in self._frozen.values()]
        flags = torch.tensor([*own, *thawed], dtype=torch.uint8)
        flags = self._mesh.max_of(flags)

        present, thawed = [part.tolist() for part in flags.split([len(own), len(thawed)])]
        for name, is_thawed in zip(self._frozen, thawed, strict=True):
            if is_thawed:
                raise unfrozen(name)

        absent = {
            name for name, is_present in zip(self._trained, present, strict=True) if not is_present
        }
        if not absent:
            return
        self._mode.leave_out(absent)


def is_zero(grad: Tensor | None) -> bool:
    """Return whether all elements of a gradient on the CPU are zero, or there is none."""
    if grad is None or not grad.numel():
        return True
    # The first element answers for nearly all gradients, and is read in a microsecond.
    return not grad.reshape(-1)[0].item() and not grad.any()


class FrozenParameters(StepHook):
    """Refuses a parameter that a script lets train in the middle of a run, on one rank.

    Neither its optimizer state nor the setting itself would be in a checkpoint. AbsentGradients looks
    at the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def add_up(self) -> None:
        """Raise ConfigError if a parameter that was frozen when the run began is so no longer."""
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise unfrozen(name)
