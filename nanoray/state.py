"""The state of a run: everything that a step changes and that the next step needs, on any rank.

    TrainState   model, optimizer, scaler, guards (parts) + step, samples, losses, clock (scalars)
       │  pack()  ─► StateDict ─► a checkpoint's files
       │                      └─► a newcomer's memory, over the process group (share)
       └─ load()  ◄─ StateDict ◄─ a resume, a rollback, a recovery

One serialiser serves all of them, and the tensors that it packs are the tensors that replicas
compare by hash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanoray.errors import CheckpointError
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Piece, Shard, is_cut, whole_shards

# The key of what each rank alone keeps of compressed gradients, beside its generators
MEMORY = "compression"
PROBE = (2, 8)  # the parameter that an optimizer is tried on
EMA_DECAY = 0.99  # per step, of the smoothed loss


class Part(Protocol):
    """A piece of the state that keeps its own values, such as the loss scaler or the guards."""

    def values(self) -> dict[str, Any]:
        """Return the part as JSON-safe values."""

    def load_values(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned; an empty dict leaves the part as it is."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on all replicas."""


@dataclass
class StateDict:
    """A TrainState as plain data. `meta` holds `step` and anything else that is JSON.

    With `pieces`, each tensor of a parameter named there is that piece, flat; other tensors are
    whole.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # flat names: "exp_avg.<param>", "step.<param>"
    # Per rank: generators, loader, compression's memory
    rng: list[dict[str, Tensor]] = field(default_factory=list)
    scaler: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, Piece] | None = None  # by parameter; None: all tensors are whole
    # Further names of tied weights, which are saved once
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass
class Scalars:
    """What a resumed run continues with, besides tensors."""

    step: int = 0  # completed optimizer steps
    samples: int = 0  # sequences consumed by them: the one cursor of the data
    loss: float | None = None  # of the newest logged step, mean over all ranks
    # Exponential moving average of the logged losses, EMA_DECAY per step
    loss_ema: float | None = None
    ema_step: int = 0  # the step of the newest loss in it
    val_loss: float | None = None
    best_val_loss: float | None = None
    train_s: float = 0.0  # seconds spent in timed steps, over all parts of the run
    timed_steps: int = 0


@dataclass
class Session:
    """What one command knows about its run. It survives the loss of a rank, and starts anew after a
    resume.

    The step fields record what has been done at the end of the newest step. So an interrupted end
    can be repeated: nothing is reported twice and nothing is skipped.
    """

    begun: int = 0  # the step at which this command started
    current: int = 0  # the step being computed, or just completed
    first_step_s: float | None = None  # from the command to the end of its first step
    evaluated: int = -1
    reported: int = -1
    saved: int = -1
    compared: int = -1
    record: dict[str, Any] | None = None  # of a completed step whose end is not done
    newest: dict[str, Any] = field(default_factory=dict)  # the last reported record

    def reported_step(self, step: int) -> int:
        """Return the newest reported step, given the newest completed one."""
        return step - 1 if self.record is not None and self.reported != step else step


@dataclass
class Holding:
    """Shards in this rank's memory, and the optimizer that updates them."""

    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    owner: int  # the rank whose shards they are: this one, or the one that it mirrors


class Update(NamedTuple):
    """What a rank needs besides its gradients to do the newest step's update as all others have
    done it.
    """

    norm: Tensor | None = None  # of the whole gradient
    leave_out: Tensor | None = None  # 1: the update was left out


class TrainState:
    """One rank's share of the state of a run: the weights, and the optimizer state of its shards of
    them.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Part, guards: Part
    ) -> None:
        """Take the parts as they are at step 0. `whole` is set once they hold the state of the run."""
        self.model, self.optimizer, self.scaler, self.guards = model, optimizer, scaler, guards
        self.scalars, self.session = Scalars(), Session()
        self.shards = whole_shards(model)
        self.sharded = False  # whether other ranks hold the optimizer state of other shards
        # The weights of this rank, where no rank has them all
        self.weights: list[Shard] | None = None
        # Another rank's share, updated here from the same gradients
        self.mirror: Holding | None = None
        # The buffers of a model that belonged to a group which is gone
        self.left: dict[str, Tensor] | None = None
        # What this rank's compressed gradients left over, flat; no other rank has it
        self.memory: Tensor | None = None
        # Whether other ranks may copy this state: only after a resume or recovery is done
        self.whole = False
        # Whether gradients of the next step are here that complete it without lost ranks
        self.can_finish = False
        self.update = Update()  # the newest one

    def hold(
        self,
        own: Holding,
        mirror: Holding | None,
        sharded: bool,
        weights: list[Shard] | None = None,
    ) -> None:
        """Keep these from now on. With `sharded`, other ranks have the optimizer state of other
        shards.

        With `weights` this rank holds only these parts of the model's weights.
        """
        self.shards, self.optimizer, self.mirror = own.shards, own.optimizer, mirror
        self.sharded, self.weights = sharded, weights

    def leave_model(self) -> None:
        """Part with a model that a group of ranks has cut, and keep its buffers; what is held of it
        is in shards.
        """
        # Else the next group broke, too, before it stood
        self.left = self.buffers if self.left is None else self.left
        self.model = nn.Module()

    def take_left(self) -> None:
        """Give a new model the buffers of the one before, if that was left."""
        for name, buffer in (self.left or {}).items():
            self.buffers[name].copy_(buffer)
        self.left = None

    @property
    def shards_weights(self) -> bool:
        """Whether no rank has all weights."""
        return self.weights is not None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """This rank's own optimizer, and the one of the share that it mirrors."""
        return [self.optimizer, *([self.mirror.optimizer] if self.mirror else [])]

    @property
    def pieces(self) -> dict[str, Piece]:
        """Which part of each parameter this rank's optimizer updates; empty if that is all of it."""
        return {shard.piece.name: shard.piece for shard in self.shards} if self.sharded else {}

    @property
    def weight_pieces(self) -> dict[str, Piece] | None:
        """Which part of each parameter this rank has; None: all of it."""
        return (
            {shard.piece.name: shard.piece for shard in self.weights}
            if self.weights is not None
            else None
        )

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that are part of its state, such as running statistics, equal on all
        replicas.
        """
        saved = self.model.state_dict().keys()  # which leaves out the others
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.scalars.step

    @property
    def samples(self) -> int:
        """Sequences consumed by them."""
        return self.scalars.samples

    def advance(self, samples: int, update: Update | None = None) -> None:
        """Count a completed step of `samples` sequences."""
        self.scalars.step += 1
        self.scalars.samples += samples
        self.update, self.can_finish = update or Update(), False

    def see_loss(self, loss: float, smooth: bool) -> None:
        """Record a logged step's mean loss; `smooth` adds it to the moving average.

        A resumed run logs its first step besides the regular ones. The average leaves that loss
        out, so that it equals the average of an uninterrupted run.
        """
        s = self.scalars
        s.loss = loss
        if smooth:
            keep = EMA_DECAY ** (s.step - s.ema_step)
            s.loss_ema = loss if s.loss_ema is None else keep * s.loss_ema + (1 - keep) * loss
            s.ema_step = s.step

    @property
    def reported_step(self) -> int:
        """The newest reported step; records after it in metrics.jsonl will be written again."""
        return self.session.reported_step(self.step)

    def tensors(self) -> dict[str, Tensor]:
        """Return, in one order on all ranks, the live tensors that must be equal on all replicas.

        Of a model that is cut, the pieces that other ranks hold as well, by their places: not all
        ranks have the same.
        """
        weights = () if self.shards_weights else self.model.named_parameters()
        tensors = {name: p.detach() for name, p in weights}
        if is_cut(self.model):
            tensors = {s.piece.place: s.param.detach() for s in self.weights or () if s.holders > 1}
            shared = {s.piece.name: s.piece.place for s in self.shards if s.holders > 1}
            for name, tensor in optimizer_tensors(self.optimizer, self.shards).items():
                key, _, param = name.partition(".")
                tensors |= {f"{key}.{shared[param]}": tensor} if param in shared else {}
        tensors |= self.buffers
        if not self.sharded:
            tensors |= dict(sorted(optimizer_tensors(self.optimizer, self.shards).items()))
        return tensors | self.scaler.tensors()

    def pack_own(self, first: bool) -> StateDict:
        """Return what this rank saves of a sharded state: what it owns. The `first` rank adds what
        nobody owns.
        """
        packed, shards = self.pack(), [shard for shard in self.shards if shard.owner]
        pieces = {shard.piece.name: shard.piece for shard in shards}
        aliases = {name: origin for name, origin in _aliases(self.model).items() if name != origin}
        ownerless = self.without_owner(packed.model) if first else {}
        packed.model = {shard.piece.name: shard.param.detach() for shard in shards} | ownerless
        every = optimizer_tensors(self.optimizer, self.shards)
        packed.optimizer = {
            name: tensor for name, tensor in every.items() if name.partition(".")[2] in pieces
        }
        packed.pieces, packed.aliases = pieces, aliases
        return packed

    def without_owner(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what no optimizer updates of a model's tensors: buffers and frozen weights."""
        owned = {name for name, p in self.model.named_parameters() if p.requires_grad}
        aliases = _aliases(self.model)
        return {n: t for n, t in model.items() if n not in owned and aliases[n] == n}

    def pack(self, rng: list[dict[str, Tensor]] | None = None) -> StateDict:
        """Return what this rank shares with the others, as data: all of the state, unless it is
        sharded.

        The tensors are the live ones, which the next step changes.
        """
        s = self.scalars
        return StateDict(
            model=self.buffers if self.shards_weights else self.model.state_dict(),
            optimizer={} if self.sharded else optimizer_tensors(self.optimizer, self.shards),
            rng=rng or [],
            scaler=self.scaler.values(),
            meta={
                "step": s.step,
                "samples_seen": s.samples,
                "val_loss": s.val_loss if self.session.evaluated == s.step else None,
                "best_val_loss": s.best_val_loss,
                "scalars": asdict(s),
                "guards": self.guards.values(),
            },
        )

    def load(self, saved: StateDict, optimizer: bool = True, weights: bool = True) -> None:
        """Load what `pack` returned, in place. Raises CheckpointError for another optimizer or
        model.

        Of a sharded state, `saved.optimizer` has this rank's pieces. Without `optimizer` the
        optimizer keeps its state; without `weights` only those are loaded that `saved` has. A
        checkpoint of an older nanoray has no scalars of its own; step, cursor and losses are in its
        meta.
        """
        self._load_weights(saved.model, weights)
        self.can_finish = False
        # Before its first step an optimizer has no state
        if optimizer and (saved.optimizer or saved.meta["step"] > 0):
            load_optimizer_tensors(self.optimizer, self.shards, saved.optimizer)
        self.scaler.load_values(saved.scaler)
        meta = saved.meta
        old = {"step": meta["step"], "samples": meta["samples_seen"], "ema_step": meta["step"]}
        old |= {key: meta.get(key) for key in ("val_loss", "best_val_loss")}
        self.scalars = Scalars(**meta.get("scalars", old))
        self.guards.load_values(meta.get("guards", {}))
        step = self.step
        self.session = Session(begun=step, current=step, evaluated=step, reported=step, saved=step)

    def load_memory(
        self, saved: StateDict, rank: int, ranks: int, forget: Callable[[], None]
    ) -> bool:
        """Take over what as many ranks had left over, or `forget`; return whether nothing was
        dropped or missing.

        This state outlives a group of ranks. So it keeps no reference to what knows the group, as
        `forget` does: others notice that a rank has left when its connections close, which they do
        when nothing refers to the group. Afterwards `saved` has no memory any more: it is as large
        as the weights, for each rank.
        """
        kept = [of.pop(MEMORY, None) for of in saved.rng]
        if self.memory is None:
            return not any(of is not None for of in kept)
        own = kept[rank] if len(kept) == ranks else None
        if own is None or own.shape != self.memory.shape:
            forget()
            return False
        self.memory.copy_(own)
        return True

    @torch.no_grad()
    def _load_weights(self, saved: dict[str, Tensor], all_of_them: bool) -> None:
        if self.weights is None:
            self.model.load_state_dict(saved, strict=all_of_them)
            return
        for shard in self.weights:
            if shard.piece.name in saved:  # else a rank shares its state, which has no weights
                shard.param.copy_(saved[shard.piece.name].view_as(shard.param))
        for name, buffer in self.buffers.items():
            buffer.copy_(saved[name])

    def rewind(self, saved: StateDict, samples: int) -> None:
        """Go back to `saved` and continue with the data from `samples`. Clock and guards keep their
        values.
        """
        now, guards, first_step_s = self.scalars, self.guards.values(), self.session.first_step_s
        self.load(saved)
        self.scalars.samples = samples
        self.scalars.train_s, self.scalars.timed_steps = now.train_s, now.timed_steps
        self.guards.load_values(guards)
        self.session.first_step_s = first_step_s


def share(state: TrainState, mesh: Mesh, source: int) -> None:
    """Copy the whole state of rank `source` to all ranks, tensor by tensor. (all ranks)

    Nothing is read from disk. Afterwards every rank has the source's parameters, optimizer, scaler,
    guards, scalars and session. Where weights or optimizer state are sharded, each rank keeps its
    own.
    """
    packed, session = fetch(state, mesh, source)
    if mesh.rank != source:
        state.load(packed, optimizer=not state.sharded)
    state.session, state.whole = session, True


def fetch(
    state: TrainState, mesh: Mesh, source: int, pieces: bool = True
) -> tuple[StateDict, Session]:
    """Return the state and session of rank `source`, without its shards if it is sharded. (all
    ranks)

    Nothing is loaded yet. Without `pieces` it leaves out all that an optimizer updates.
    """
    own = mesh.rank == source
    packed = state.pack() if own else StateDict({}, {})
    if not pieces:
        packed.model, packed.optimizer = state.without_owner(packed.model), {}
    aliases = _aliases(state.model)
    tensors = {
        ("model", name): packed.model[name] for name in {*aliases.values()} & packed.model.keys()
    }
    tensors |= {("optimizer", name): tensor for name, tensor in packed.optimizer.items()}
    layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    layout, packed.scaler, packed.meta, session = mesh.broadcast(
        (layout, packed.scaler, packed.meta, asdict(state.session)), src=source
    )
    for key, shape, dtype in layout:
        if not own:
            tensors[key] = torch.empty(shape, dtype=dtype, device=mesh.device)
        mesh.broadcast_tensor(tensors[key].to(mesh.device), source)
    if not own:
        packed.model = {
            n: tensors["model", first]
            for n, first in aliases.items()
            if ("model", first) in tensors
        }
        packed.optimizer = {
            name: tensor for (part, name), tensor in tensors.items() if part == "optimizer"
        }
    return packed, Session(**session)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's random generators as bytes."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned, for the generators that this device has."""
    torch.set_rng_state(state["cpu"].clone())  # a view into a checkpoint's buffer may be unaligned
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return each name of the model's state with the first name of the same tensor: tied weights
    travel once.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()
    }


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> dict[str, Tensor]:
    """Return the optimizer's state as one flat dict with names such as `exp_avg.<parameter>`."""
    names: dict[Tensor, str] = {shard.param: shard.piece.name for shard in shards}
    return {
        f"{key}.{names[p]}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard], tensors: dict[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` returned, in place on each parameter's device.

    Raises CheckpointError when the state belongs to another optimizer or to other parameters.
    """
    params = {shard.piece.name: shard.param for shard in shards}
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    alone = None if hasattr(optimizer, "state_keys") else kept_alone(optimizer)
    expected = getattr(optimizer, "state_keys", alone)
    scalars = {"step", *(key for key, kept in (alone or {}).items() if not kept.dim())}
    found = {name.split(".", 1)[0] for name in tensors}
    if expected is not None and found != {*expected}:
        raise CheckpointError(
            f"optimizer state holds {sorted(found) or 'nothing'}, but {type(optimizer).__name__} "
            "needs "
            f"{sorted(expected) or 'nothing'}; resume with the optimizer that wrote it"
            + (", in its precision" if hasattr(optimizer, "state_keys") else "")
        )
    for name, tensor in tensors.items():
        key, param = name.split(".", 1)
        like = params.get(param)
        scalar = key in scalars and tensor.numel() == 1
        if like is None or not (scalar or tensor.shape in (like.shape, (like.numel(),))):
            raise CheckpointError(
                f"optimizer state {name} {tuple(tensor.shape)} does not fit this model's parameters"
            )
        if scalar:  # as Adam keeps it: on the host, but for kernels that read it on the device
            on_device = group_of[like].get("fused") or group_of[like].get("capturable")
            on_device = on_device and not getattr(optimizer, "scalars_on_host", False)
            optimizer.state[like][key] = tensor.reshape(()).to(
                like.device if on_device else "cpu", copy=True
            )
            continue
        same = not isinstance(optimizer, torch.optim.AdamW | torch.optim.SGD)
        kind = tensor.dtype if same else like.dtype  # of a run in another precision
        kind = getattr(optimizer, "state_type", kind)
        optimizer.state[like][key] = tensor.view_as(like).to(like.device, kind, copy=True)


def kept_alone(optimizer: torch.optim.Optimizer) -> dict[str, Tensor] | None:
    """Return what an optimizer keeps for a parameter of shape PROBE after a step; None if it cannot
    be tried so.

    With several groups, what it keeps in any of them.
    """
    kept: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(PROBE))
        probe.grad = torch.zeros(PROBE)
        settings = {key: value for key, value in group.items() if key != "params"}
        try:
            alike = type(optimizer)([settings | {"params": [probe]}], lr=settings["lr"])  # type: ignore[call-arg]
            alike.step()
        except Exception as error:
            logging.getLogger("nanoray").info(
                "%s could not be tried alone: %r", type(optimizer).__name__, error
            )
            return None
        kept |= {
            key: value for key, value in alike.state[probe].items() if isinstance(value, Tensor)
        }
    return kept
