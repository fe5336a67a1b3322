"""Fully sharded data parallelism: torch's fully_shard, behind the same pieces as everything else.

    forward    all-gather a block's weights ─► compute ─► free them (reshard "full") or keep them ("grad_op")
    backward   all-gather again if freed ─► compute ─► reduce-scatter its gradients ─► free both

    rank 0     rows 0 .. of every parameter, with their gradients and optimizer state
    rank 1     the rows after them, ...

A mirror of another rank's rows is plain tensors of its own, outside of torch's group.

fully_shard (FSDP2) keeps each rank's rows in a DTensor; optimizer, norm and checkpoints see its
local tensor, in the same memory. Gradients are summed in the order of the ranks, so the weights
have the bits of zero2's: always with plain SGD, with AdamW or momentum if every rank's rows are a
multiple of 16 elements. The fused kernel rounds the rest of a tensor otherwise. Source: Zhao et al.
2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO stage 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.compat import all_gather_single, gradient_hooks
from nanoray.models.batch_norm import BatchNorm
from nanoray.parallel.axis import Axis
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.norm import norm_of_owned
from nanoray.parallel.pieces import Piece, Shard, received_gradients, whole_pieces

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class FSDP(DataParallel):
    """Shards a model's weights, gradients and optimizer state over the ranks, block by block."""

    keeps_groups = True  # DTensor (torch 2.13) keeps the names of groups beyond its own life

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        config: Config,
        mirror: int = 0,
        groups: Groups | None = None,
    ) -> None:
        """Cut `model`, in place, and keep this rank's rows. (all ranks of the axis)

        They must hold equal weights. mirror: rank r + mirror also updates a copy of rank r's rows,
        from the same gradients; 0: no rank does. groups: those across which the rows' gradients are
        summed, of which `axis` is one.
        """
        super().__init__(model, axis, groups)
        self.divisor = self._data.size
        self._mirror = mirror
        self._model = model
        refuse_to_cut(model, config.fsdp_gather)

        # Shapes, pieces and the mirrored rank's rows come from the whole parameters.
        pieces = pieces_to_cut(model)
        if mirror:
            copies = self._copied(model, pieces)
            self.mirror_shards = [shard for shard in copies if shard.trained]
            self.mirror_frozen = [shard for shard in copies if not shard.trained]
            self._mirror_grad = received_gradients(self.mirror_shards, model)
            self.mirrored_gradients = [self._mirror_grad]

        _shard_fully(model, axis, config, groups)
        # This rank's rows, as flat views of the DTensors' local parts. Those of trained weights are
        # updated.
        self._sharded: dict[str, nn.Parameter] = {}
        self._own: list[Shard] = []
        frozen: list[Shard] = []
        for name, p in model.named_parameters():
            if name not in pieces:
                continue
            if p.requires_grad:
                self._sharded[name] = p
            assert isinstance(p, DTensor)
            local = p.to_local().detach()
            piece = rows_of(pieces[name], p.shape[0], axis.size, axis.index)
            assert local.numel() == piece.numel, name
            if piece.numel:  # a rank may have no row of a short parameter
                param = nn.Parameter(local.view(-1), requires_grad=p.requires_grad)
                shards = self._own if p.requires_grad else frozen
                shards.append(_shard_of(piece, param, pieces[name]))
        self.shards = self._own
        self.frozen_shards = frozen

    @property
    def mirrored(self) -> int:
        """The rank of the axis whose rows this rank mirrors."""
        return (self._axis.index - self._mirror) % self._axis.size

    def _copied(self, model: nn.Module, pieces: dict[str, Piece]) -> list[Shard]:
        """Return copies of the mirrored rank's rows of a whole model."""
        shards = []
        for name, p in model.named_parameters():
            if name not in pieces:
                continue
            piece = rows_of(pieces[name], p.shape[0], self._axis.size, self.mirrored)
            begin, end = piece.span_in(pieces[name])
            if piece.numel:
                copy = p.detach().reshape(-1)[begin:end].clone()
                param = nn.Parameter(copy, requires_grad=p.requires_grad)
                shards.append(_shard_of(piece, param, pieces[name]))
        return shards

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        """Run a backward inside; the last one sums the gradients of all micro batches. (all ranks)"""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        yield
        if not last:
            return
        if self.mirror_shards:
            sizes = [shard.param.numel() for shard in self.mirror_shards]
            parts = self._mirror_grad.split(sizes)
            for shard, part in zip(self.mirror_shards, parts, strict=True):
                shard.param.grad = part
        for shard in self._own:
            grad = self._sharded[shard.piece.name].grad
            if grad is None:  # it took no part in this step
                shard.param.grad = torch.zeros_like(shard.param)
                continue
            assert isinstance(grad, DTensor)
            shard.param.grad = grad.to_local().view(-1)

    def sum_of(self, p: nn.Parameter) -> Tensor:
        raise NotImplementedError("a pipeline has no fsdp")

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's rows, flat."""
        return [shard.param.grad for shard in self._own if shard.param.grad is not None]

    def mirror_gradients(self) -> bool:
        if self.mirror_shards is None:
            return False
        # Zeros in place of absent gradients: what is sent has the same size in every step. A rank
        # may have no rows at all.
        own = [self._mirror_grad[:0]]
        for shard in self._own:
            grad = shard.param.grad
            own.append(torch.zeros_like(shard.param) if grad is None else grad)
        self._axis.start_pass_on(torch.cat(own), self._mirror, "mirror", self._mirror_grad)()
        return True

    def norm(self) -> Tensor:
        # Of several groups that hold the same rows, the first one counts them.
        counts = self._groups is None or self._groups.is_first
        owned = self.gradients if counts else []
        return norm_of_owned(owned, self._data, self._axis.mesh.device)

    def forget_gathered(self) -> None:
        # The model's own unit keeps its weights after a forward, until a backward has ended.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def zero_grad(self) -> None:
        for p in self._sharded.values():
            p.grad = None
        for shard in self._own:
            shard.param.grad = None


def _shard_of(piece: Piece, param: nn.Parameter, whole: Piece) -> Shard:
    """Return a part of the parameter `whole` as a shard."""
    decays = len(whole.shape) >= 2
    return Shard(piece, param, decays, cut_from=whole, trained=param.requires_grad)


def pieces_to_cut(model: nn.Module) -> dict[str, Piece]:
    """Return the parameters that fully_shard cuts, as whole pieces."""
    kept = kept_whole(model)
    pieces = whole_pieces(model)
    for name, p in model.named_parameters():
        if p in kept:
            pieces.pop(name, None)
        elif not p.requires_grad:
            pieces[name] = Piece.whole(name, p.shape)
    return pieces


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that every rank keeps whole, because fully_shard cannot cut them.

    They are frozen ones that are single numbers or no floating point (quantised weights), and empty
    ones.
    """
    kept = set()
    for p in model.parameters():
        cannot_be_cut = not p.dim() or not p.is_floating_point()
        if not p.numel() or (cannot_be_cut and not p.requires_grad):
            kept.add(p)
    return kept


def frozen_to_cut(model: nn.Module) -> list[Shard]:
    """Return the frozen weights of a whole model that fully_shard would cut, as whole shards."""
    parameters = dict(model.named_parameters())
    shards = []
    for name, piece in pieces_to_cut(model).items():
        if not parameters[name].requires_grad:
            shards.append(_shard_of(piece, parameters[name], piece))
    return shards


def _shard_fully(model: nn.Module, axis: Axis, config: Config, groups: Groups | None) -> None:
    """Apply torch's fully_shard to each layer, then to the rest. (all ranks of the axis)"""
    group = axis.group or dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, axis.mesh.device.type, mesh_dim_names=(axis.name,))
    gathered_as = torch.bfloat16 if config.fsdp_gather == "bf16" else None
    # Sums in float32 at least: a model in float64 keeps its digits.
    summed_as = torch.float32
    if any(p.dtype == torch.float64 and p.requires_grad for p in model.parameters()):
        summed_as = torch.float64
    policy = MixedPrecisionPolicy(param_dtype=gathered_as, reduce_dtype=summed_as)
    kept = kept_whole(model)

    # Layers within layers first. What is left, such as the embeddings, is gathered with the whole
    # model; backward needs it first, so it is not freed between.
    reshard = config.fsdp_reshard == "full"
    for unit in reversed(units_of(model)):
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=kept
        )
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=kept
    )

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The factor of the mean is on the loss, so what follows is a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_AllGather(axis))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter(axis, groups))  # type: ignore[arg-type]


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: the layers in lists of layers.

    All other weights are one more unit. A layer that has such lists itself comes before what they
    contain, and has the weights outside of them.
    """
    units = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            units += [layer for layer in module if not isinstance(layer, _CONTAINERS)]
    return units


def unit_of(model: nn.Module) -> dict[nn.Parameter, set[int]]:
    """Return the indices in `units_of` of the units of each parameter; -1: the rest.

    A tied parameter may lie in several.
    """
    unit_of_module: dict[nn.Module, int] = {}
    for i, unit in enumerate(units_of(model)):
        for module in unit.modules():
            unit_of_module[module] = i  # an inner layer comes later

    units: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            units.setdefault(p, set()).add(unit_of_module.get(module, -1))
    return units


def refuse_to_cut(model: nn.Module, gather: str) -> None:
    """Raise ConfigError for a model that fully_shard cannot cut as it is."""
    names = {p: name for name, p in model.named_parameters()}
    kept = kept_whole(model)
    for p, units in unit_of(model).items():
        if p in kept:
            continue
        if p.is_complex():
            raise ConfigError(
                f"dp_mode = fsdp sums gradients as real numbers, but {names[p]} is {p.dtype}; use "
                "dp_mode zero2"
            )
        if not p.dim():
            raise ConfigError(
                f"dp_mode = fsdp cuts parameters by rows, but {names[p]} is a single number; give "
                "it the shape (1,), or use dp_mode zero2"
            )
        if gradient_hooks(p):
            raise ConfigError(
                f"dp_mode = fsdp replaces parameters by their rows, and {names[p]} has a hook on "
                "its gradient, which would be lost; use dp_mode zero2"
            )
        if len(units) > 1:
            raise ConfigError(
                f"dp_mode = fsdp gathers the weights of a layer together, but {names[p]} belongs "
                "to several layers; use dp_mode zero2"
            )
    if gather == "bf16" and any(isinstance(module, BatchNorm) for module in model.modules()):
        raise ConfigError(
            "fsdp_gather = bf16 with batch normalisation: it needs float32 weights; use "
            "fsdp_gather fp32"
        )


def rows_of(piece: Piece, rows: int, ranks: int, index: int) -> Piece:
    """Return the part of a parameter, of `rows` rows, that fully_shard leaves to rank `index`."""
    share = -(-rows // ranks)  # the last ranks may have fewer, or none
    row = piece.numel // rows  # elements
    first = min(rows, index * share)
    last = min(rows, first + share)
    return piece.flat_range(first * row, last * row)


class _Memory:
    """A temporary buffer for each call."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """The backend's all-gather, reported to the mesh's listener.

    `input_tensor` is this rank's slice of `output_tensor`.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if self._axis.through_host(output_tensor):
            self._axis.start_all_gather(output_tensor, "weights")()
            return None
        with self._axis.noted("all_gather", "weights", output_tensor):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Memory):
    """A reduce-scatter that adds in the order of the ranks, and then in that of the groups."""

    def __init__(self, axis: Axis, groups: Groups | None) -> None:
        super().__init__(axis)
        self._groups = groups

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with self._axis.noted("reduce_scatter", "gradients", input_tensor):
            self._axis.start_reduce_scatter(input_tensor, "gradients")(output_tensor)
        if self._groups:
            self._groups.sum(output_tensor)
