"""torch's fully_shard for a model that may skip layers and parameters, on some ranks only.

torch sums only the parameters with a gradient on this rank, which would match others elsewhere; and it
gathers a layer where the layer is called, so the ranks must call all of them in one order
(layer_order.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanoray.base.compat import sum_unused_parameters
from nanoray.config import Config
from nanoray.mesh.axis import Axis
from nanoray.own.layer_order import LayerOrder
from nanoray.parallel.fsdp import FSDP, units_of
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.script import unfrozen


class SkippingFSDP(FSDP):
    """FSDP in which every rank gathers, and sums, what any rank does."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        config: Config,
        mirror: int = 0,
        groups: Groups | None = None,
    ) -> None:
        """Cut `model`, in place, as FSDP does. (all ranks of the axis, of which there are several)"""
        super().__init__(model, axis, config, mirror, groups)
        self._computed: set[str] = set()
        self._skips = False  # the ranks called different layers in the warm-up
        # Whole parameters, as forwards use them: those that are trained, and the others
        self._gathered: list[nn.Parameter] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        assert isinstance(model, FSDPModule)
        sum_unused_parameters(model)
        # A compiled layer cannot be called as the identity.
        self._layers = None if config.compile else LayerOrder(model, units_of(model))
        self._watch_gradients(model)

    def _watch_gradients(self, model: nn.Module) -> None:
        """Note which parameters have a gradient of this rank.

        By hooks on those that a forward uses, which are not the model's own rows. They exist when
        torch's hook has gathered them.
        """
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        names = {id(module): name for name, module in model.named_modules()}
        hooked: set[int] = set()
        computed = self._computed
        gathered = self._gathered
        frozen = self._frozen
        for unit in units:
            assert isinstance(unit, nn.Module)

            def watch(unit: nn.Module, *_: Any) -> None:
                if id(unit) in hooked:
                    return
                hooked.add(id(unit))
                for name, p in _own_params(unit, names[id(unit)]):
                    if not p.requires_grad:
                        frozen.append((name, p))
                        continue
                    gathered.append(p)
                    p.register_post_accumulate_grad_hook(partial(_note, computed, name))

            unit.register_forward_pre_hook(watch)

    def learn(self) -> None:
        if self._layers is not None:
            calls_of_ranks = self._axis.mesh.all_gather(self._layers.calls)
            self._layers.learn(calls_of_ranks)
            self._skips = any(calls != calls_of_ranks[0] for calls in calls_of_ranks)

    @property
    def notes(self) -> list[str]:
        if not self._skips:
            return []
        return [
            "note    the ranks call different layers, and fsdp gathers the weights of all of them "
            "on every rank: dp_mode zero2 sends less"
        ]

    @property
    def checksum(self) -> int:
        return 0 if self._layers is None else self._layers.checksum

    @property
    def computed(self) -> set[str]:
        return self._computed

    def leave_out(self, absent: Collection[str]) -> None:
        # `backward` sets them anew in each step.
        for shard in [*self._own, *(self.mirror_shards or ())]:
            if shard.piece.name in absent:
                shard.param.grad = None

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        for name, p in self._frozen:
            if p.requires_grad:  # its gradient would have no counterpart on other ranks
                raise unfrozen(name)
        # A parameter that the script has frozen on this rank takes part in the sum with zeros.
        frozen = [p for p in self._gathered if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        with super().backward(last, chunk, late):
            yield
        for p in frozen:
            p.requires_grad_(False)
        if not last:
            return
        # A hook of a script may have set a gradient without a backward that computes it.
        for shard in self._own:
            grad = shard.param.grad
            if shard.piece.name not in self._computed and grad is not None and grad.any():
                self._computed.add(shard.piece.name)

    def zero_grad(self) -> None:
        self._computed.clear()
        if self._layers is not None:
            self._layers.checksum = 0
        super().zero_grad()


def _own_params(unit: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters that are gathered with a unit, by their names in the model."""
    for name, p in unit.named_parameters(prefix):
        if not isinstance(p, DTensor):
            yield name, p


def _note(computed: set[str], name: str, p: Tensor) -> None:
    """Note a gradient that backward has computed; one of a skipped layer is undefined."""
    if p.grad is not None:
        computed.add(name)
