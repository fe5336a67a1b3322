"""Parameters without a gradient: in a step that no rank computes one, they rest, as in plain torch.

    rank 0   a  b  ·  ·   ┐ the larger byte of all ranks:      a  b  c  ·     d.grad is None: no weight
    rank 1   a  ·  c  ·   ┘ 1 where a rank has a gradient                     decay, no momentum, no step

A model may skip a branch, freeze a tower by no_grad, or have a head that no loss reads. The modes
sum buckets of all parameters, with zeros where this rank has no gradient. A sum of zeros is no
missing gradient: it would let weight decay and momentum move the parameter. So after the last
backward the ranks exchange a byte for each parameter, and gradients that no rank has become None.

The bytes pass over the control group, from host to host, so no GPU is waited for. nanoray's own models
always use all of their parameters, and fsdp refuses one that does not (even_fsdp.py).
"""

from __future__ import annotations

import torch
from torch import nn

from nanoray.errors import ConfigError
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel


class AbsentGradients(StepHook):
    """Takes away the gradients that no rank has computed, before anything reads them."""

    def __init__(self, model: nn.Module, mode: DataParallel, mesh: Mesh) -> None:
        """Watch the trainable parameters of `model`, which `mode` has prepared. (all ranks)"""
        self._mode = mode
        self._mesh = mesh
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]

    def add_up(self) -> None:
        """Find the parameters that no rank has a gradient of, and set theirs to None. (all ranks)

        It comes before the norm, which is the commit point: once one rank has the norm, all ranks
        have this result, and can finish the step without a lost rank.
        """
        # (all ranks) A byte for each parameter, in the same order on all ranks.
        computed = self._mode.computed
        own = torch.tensor([name in computed for name in self._trained], dtype=torch.uint8)
        present = self._mesh.max_of(own).tolist()

        absent = set()
        for name, is_present in zip(self._trained, present, strict=True):
            if not is_present:
                absent.add(name)
        if absent:
            self._mode.leave_out(absent)


class FrozenParameters(StepHook):
    """Refuses a parameter that a script lets train in the middle of a run.

    No rank would share its gradient, and no checkpoint keep its optimizer's state.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def add_up(self) -> None:
        """Raise ConfigError, on all ranks, if a parameter that was frozen is so no longer on one.

        Without a frozen parameter nothing is sent. (all ranks)
        """
        if not self._frozen:
            return
        own = torch.tensor([p.requires_grad for p in self._frozen.values()], dtype=torch.uint8)
        trains = self._mesh.max_of(own).tolist()
        for name, begins in zip(self._frozen, trains, strict=True):
            if begins:
                raise ConfigError(
                    f"{name} had requires_grad = False when the run began, and has True now: no rank "
                    "would share its gradient or save its state. Let it require a gradient when "
                    "RuntimeEngine is made, and freeze it then until its step"
                )
