"""The state of a run: everything that a step changes and that the next step needs, on any rank.

    TrainState   model, optimizer, scaler, guards (parts) + step, samples + losses, clock (scalars)
       │  pack()  ─► StateDict ─► a checkpoint's files
       │                      └─► a new rank's memory, over the process group (share)
       └─ load()  ◄─ StateDict ◄─ a resume, a rollback, a recovery

One serialiser serves all of them, and the tensors that it packs are the tensors that replicas
compare by hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanoray.errors import CheckpointError
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Piece, Shard, is_cut, whole_shards
from nanoray.state.modules import (
    EXTRA,
    assign,
    buffer_names,
    buffers_of,
    join,
    set_extra_states,
    split,
    write_buffers,
)
from nanoray.state.optimizers import (
    changed_groups,
    group_values,
    load_groups,
    load_tensors,
    tensors_of,
    values_of,
)
from nanoray.state.outer import Outer, fragments_of, without_outer
from nanoray.state.values import tensors_within

# Keys beside each rank's generators: its memory of compressed gradients; of a replica that rarely
# communicates, when it joined, and its loss scale
MEMORY = "compression"
REPLICA = "replica"
EMA_DECAY = 0.99  # per step, of the smoothed loss
Rate = float | Tensor | None  # a learning rate; a tensor may lie on a GPU

# The kinds of a model's tensors: weights, persistent buffers, and other entries of its state_dict
TRAINED = "trained"
FROZEN = "frozen"
BUFFER = "buffer"
ENTRY = "entry"
WEIGHTS = (TRAINED, FROZEN)
Listing = dict[str, list[Any]]  # by name: kind, dtype, shape


class Part(Protocol):
    """A piece of the state that keeps its own values, such as the loss scaler or the guards."""

    def values(self) -> dict[str, Any]:
        """Return the part as JSON-safe values."""

    def load_values(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned; an empty dict leaves the part as it is."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on all replicas."""


class Schedule(Protocol):
    """The learning rates of a script's optimizer, which the configuration does not set."""

    @property
    def lr(self) -> Rate:
        """The rate of the first group in the next update; None: the optimizer has none."""

    @property
    def has_state(self) -> bool:
        """Whether there are schedulers, whose state belongs to a checkpoint."""

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the rates of the next update in these optimizers. Nothing communicates."""

    def see_loss(self, loss: float, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give the validation loss to the schedulers that follow it. Nothing communicates."""

    def values(self) -> dict[str, Any]:
        """Return the state of the schedulers as JSON."""

    def load_values(self, values: dict[str, Any] | None, step: int) -> None:
        """Restore what `values` returned after a step; None: it was saved without schedulers."""


@dataclass
class StateDict:
    """A TrainState as plain data. `meta` holds `step` and anything else that is JSON.

    With `pieces`, the tensor of a parameter named there is that piece, flat. Others are whole.
    `model` also has the tensors of extra states; meta["entries"] has what else is in these, and
    meta["tensors"] the kind, dtype and shape of each tensor of the model.
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
    replica: int = 0  # whose optimizer state this is, where replicas rarely communicate


@dataclass
class Scalars:
    """What a resumed run continues with, besides tensors and the two counters of TrainState."""

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
    """The progress of one command in its run. It survives the loss of a rank, but not a resume.

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
        is_pending = self.record is not None and self.reported != step
        return step - 1 if is_pending else step


@dataclass
class Holding:
    """Shards in this rank's memory, and the optimizer that updates them."""

    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    owner: int  # the rank whose shards they are: this one, or the one that it mirrors
    frozen: list[Shard] = field(default_factory=list)  # of weights that no optimizer updates


class Update(NamedTuple):
    """What a rank needs, besides its gradients, to repeat the newest update of the other ranks."""

    norm: Tensor | None = None  # of the whole gradient
    leave_out: Tensor | None = None  # 1: the update was left out


class TrainState:
    """One rank's share of the state of a run: weights, and the optimizer state of its shards."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Part, guards: Part
    ) -> None:
        """Take the parts as they are at step 0. `whole` is set once they hold the state of the run."""
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.guards = guards
        # A script's own learning rates; None: the configuration's schedule sets them in each step
        self.schedule: Schedule | None = None
        # The values of the optimizer's groups, to see which ones it changes
        self._group_values = group_values(optimizer)
        self.step = 0  # completed optimizer steps
        self.samples = 0  # sequences consumed by them: the one cursor of the data
        self.scalars = Scalars()
        self.session = Session()

        # What a checkpoint must contain, listed while the model is whole
        self._listed = _listing(model)
        self._sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}

        # This rank's shards. `sharded`: other ranks hold the optimizer state of other ones.
        self.shards = whole_shards(model)
        self.sharded = False
        self.weights: list[Shard] | None = None  # of this rank, where no rank has all weights
        # Groups of ranks that each hold the whole of a sharded state: several in hybrid sharding
        self.copies = 1
        self.frozen: list[Shard] = []  # of frozen weights, where a group of ranks cuts them
        self.mirror: Holding | None = None  # another rank's share, updated from the same gradients

        # Replicas that rarely communicate: what they share, besides the step; None: all is shared
        self.outer: Outer | None = None

        # The rounding errors of this rank's compressed gradients, flat; no other rank has them.
        self.memory: Tensor | None = None
        # What is whole of a model that a former group of ranks had cut: buffers, extra states
        self.left: StateDict | None = None

        # Other ranks may copy this state only after a resume or recovery is done.
        self.whole = False
        # Whether this rank holds gradients that complete the next step if others are lost
        self.can_finish = False
        self.update = Update()  # the newest one

    def hold(
        self,
        own: Holding,
        mirror: Holding | None,
        sharded: bool,
        weights: list[Shard] | None = None,
        copies: int = 1,
    ) -> None:
        """Replace the shards and their optimizers.

        sharded: other ranks have the optimizer state of other shards. weights: the parts of the
        model's weights that this rank holds; None: all. copies: groups that each hold all shards.
        """
        groups = self._changed_groups()
        self.shards = own.shards
        self.optimizer = own.optimizer
        self.frozen = own.frozen
        self.mirror = mirror
        self.sharded = sharded
        self.weights = weights
        self.copies = copies
        for optimizer in self.optimizers:
            load_groups(optimizer, groups)

    def begin_rounds(self, momentum: bool, fragments: int) -> None:
        """Keep an anchor from now on, for replicas that rarely communicate."""
        self.outer = self.anchors_of(self.shards, momentum, fragments)

    def anchors_of(self, shards: Sequence[Shard], momentum: bool, fragments: int) -> Outer:
        """Return new anchors of some shards: their weights of now."""
        return Outer(shards, momentum, fragments_of(self._sizes, fragments))

    def leave_model(self) -> None:
        """Release a model that a group of ranks has cut, and keep its buffers and extra states.

        The shards keep the weights.
        """
        # If the next group breaks before it has built a model, they are here already.
        if self.left is None:
            packed = self.pack()
            packed.model = self.without_owner(packed.model)
            self.left = packed
        self.model = nn.Module()

    def take_left(self) -> None:
        """Copy what `leave_model` has kept into the new model."""
        if self.left is not None:
            self._load_whole_tensors(self.left)
        self.left = None

    @property
    def in_parts(self) -> bool:
        """Whether each rank saves a part of the state that no other one has."""
        return self.sharded or self.outer is not None

    @property
    def shards_weights(self) -> bool:
        """Whether no rank has all weights."""
        return self.weights is not None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """This rank's own optimizer, and the one of the share that it mirrors."""
        if self.mirror is None:
            return [self.optimizer]
        return [self.optimizer, self.mirror.optimizer]

    @property
    def pieces(self) -> dict[str, Piece]:
        """Which part of each parameter this rank's optimizer updates; empty if that is all of it."""
        if not self.sharded:
            return {}
        return {shard.piece.name: shard.piece for shard in self.shards}

    @property
    def weight_pieces(self) -> dict[str, Piece] | None:
        """Which part of each parameter this rank has; None: all of it."""
        if self.weights is None:
            return None
        return {shard.piece.name: shard.piece for shard in self.weights}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that belong to its state, such as running statistics.

        They are equal on all replicas.
        """
        found = buffers_of(self.model, persistent=True)
        return {name: buffer.tensor for name, buffer in found.items()}

    def _changed_groups(self) -> list[list[dict[str, Any]]]:
        """Return the values of the optimizer's groups that have changed since the start, as JSON."""
        # Without a schedule of the script, the rate is a function of the step.
        skip = ("lr_factor",) if self.schedule else ("lr", "lr_factor")
        return changed_groups(self.optimizer, self._group_values, skip)

    def _optimizer_values(self) -> dict[str, Any]:
        """Return as JSON what belongs to the optimizers' state and is no tensor of a parameter."""
        values: dict[str, Any] = {}
        groups = self._changed_groups()
        if groups:
            values["groups"] = groups
        # Of a sharded state, no parameter has such values.
        kept = values_of(self.optimizer, _names_of(self.shards))
        if kept:
            values["state"] = kept
        if self.schedule and self.schedule.has_state:
            values["schedule"] = self.schedule.values()
        return values

    def advance(self, samples: int, update: Update | None = None) -> None:
        """Count a completed step of `samples` sequences."""
        self.step += 1
        self.samples += samples
        self.update = update or Update()
        self.can_finish = False

    def see_loss(self, loss: float, smooth: bool) -> None:
        """Record a logged step's mean loss; `smooth` adds it to the moving average.

        A resumed run logs its first step besides the regular ones. The average leaves that loss
        out, so that it equals the average of an uninterrupted run.
        """
        scalars = self.scalars
        scalars.loss = loss
        if not smooth:
            return

        # EMA_DECAY is per step, and losses are logged every few steps.
        if scalars.loss_ema is None:
            scalars.loss_ema = loss
        else:
            decay = EMA_DECAY ** (self.step - scalars.ema_step)
            scalars.loss_ema = decay * scalars.loss_ema + (1 - decay) * loss
        scalars.ema_step = self.step

    @property
    def rounds(self) -> tuple[int, ...]:
        """The steps whose weights this replica has averaged; empty where gradients are averaged."""
        if self.outer is None:
            return ()
        return tuple(self.outer.synced)

    @property
    def reported_step(self) -> int:
        """The newest reported step; records after it in metrics.jsonl will be written again."""
        return self.session.reported_step(self.step)

    def tensors(self) -> dict[str, Tensor]:
        """Return, in one order on all ranks, the live tensors that must be equal on all replicas.

        Of a model that is cut, and with several groups of hybrid sharding, these are also the
        pieces that other ranks hold as well, named by their places, and not all ranks have the same
        ones.
        """
        tensors: dict[str, Tensor] = {}
        if self.outer is not None:
            places = None
            if self.sharded:
                places = {shard.piece.name: shard.piece.place for shard in self.shards}
            return self.outer.tensors(places)
        if not is_cut(self.model) and not self.shards_weights:
            tensors = {name: p.detach() for name, p in self.model.named_parameters()}
        if is_cut(self.model) or self.copies > 1:
            tensors |= self._shared_tensors()
        tensors |= self.buffers

        # An optimizer creates its state in the order of the gradients, which may differ.
        if not self.sharded:
            tensors |= dict(sorted(optimizer_tensors(self.optimizer, self.shards).items()))
        return tensors | self.scaler.tensors()

    def _shared_tensors(self) -> dict[str, Tensor]:
        """Return the weights and optimizer state of pieces that several ranks hold, by place."""
        tensors: dict[str, Tensor] = {}
        for shard in self.weights or ():
            if shard.holders > 1:
                tensors[shard.piece.place] = shard.param.detach()

        places = {s.piece.name: s.piece.place for s in self.shards if s.holders > 1}
        for name, tensor in optimizer_tensors(self.optimizer, self.shards).items():
            key, _, param = name.partition(".")
            if param in places:
                tensors[f"{key}.{places[param]}"] = tensor
        return tensors

    def pack_own(self, first: bool) -> StateDict:
        """Return the part of a state in parts that this rank saves: the pieces that it owns.

        The `first` rank adds the tensors that have no owner. Of replicas that rarely communicate
        each saves its own state, and the first one the model.
        """
        packed = self.pack()
        owned = [shard for shard in [*self.shards, *self.frozen] if shard.owner]
        saves_model = True
        if self.outer is not None:
            packed.replica = self.outer.replica
            saves_model = packed.replica == 0
            if not self.outer.saves:
                owned = []
        packed.pieces = {shard.piece.name: shard.piece for shard in owned}

        ownerless = self.without_owner(packed.model) if first else {}
        packed.model = ownerless
        if saves_model:
            for shard in owned:
                packed.model[shard.piece.name] = self._global(shard)

        packed.optimizer = {}
        for name, tensor in self._tensors_of_shards().items():
            _, _, param = name.partition(".")
            if param in packed.pieces:
                packed.optimizer[name] = tensor

        # Tied weights are saved under their first name.
        packed.aliases = {}
        for name, origin in _aliases(self.model).items():
            if name != origin:
                packed.aliases[name] = origin
        return packed

    def _global(self, shard: Shard) -> Tensor:
        """Return the weights that belong to the model of the run: a shard's own, or the anchor."""
        if self.outer is None or shard.piece.name not in self.outer.anchor:
            return shard.param.detach()
        return self.outer.anchor[shard.piece.name]

    def _tensors_of_shards(self) -> dict[str, Tensor]:
        """Return the tensors that this rank keeps for each shard besides its weights."""
        tensors = optimizer_tensors(self.optimizer, self.shards)
        if self.outer is not None:
            tensors |= self.outer.packed(self.shards, self.step)
        return tensors

    def without_owner(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a model that are in no shard: buffers, frozen and empty weights."""
        in_shards = set()
        for name, p in self.model.named_parameters():
            if p.requires_grad and p.numel():
                in_shards.add(name)
        aliases = _aliases(self.model)
        ownerless = {}
        for name, tensor in model.items():
            if name not in in_shards and aliases.get(name, name) == name:
                ownerless[name] = tensor
        return ownerless

    def pack(self, rng: list[dict[str, Tensor]] | None = None) -> StateDict:
        """Return the state as data: all of it, or of a sharded one the part that all ranks have.

        The tensors are the live ones, which the next step changes.
        """
        scalars = self.scalars
        is_evaluated = self.session.evaluated == self.step
        optimizer_values = self._optimizer_values()
        tensors, values = split(self._whole_entries())
        if self.outer is not None:
            aliases = _aliases(self.model)
            for name in tensors:
                tensors[name] = self.outer.anchor.get(aliases.get(name, name), tensors[name])
        packed = StateDict(
            model=tensors,
            optimizer={} if self.sharded else self._tensors_of_shards(),
            rng=rng or [],
            scaler=self.scaler.values(),
            meta={
                "step": self.step,
                "samples_seen": self.samples,
                "val_loss": scalars.val_loss if is_evaluated else None,
                "best_val_loss": scalars.best_val_loss,
                "scalars": {"step": self.step, "samples": self.samples, **asdict(scalars)},
                "guards": self.guards.values(),
                "entries": values,
                "tensors": self._listed_now(tensors),
            },
        )
        if optimizer_values:
            packed.meta["optimizer"] = optimizer_values
        if self.outer is not None:
            packed.meta["outer"] = self.outer.values()
        return packed

    def _whole_entries(self, keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's state_dict, without what a group of ranks has cut: see `weights`."""
        entries = self.model.state_dict(keep_vars=keep_vars)
        if self.weights is None:
            return entries
        in_shards = {shard.piece.name for shard in self.weights}
        aliases = _aliases(self.model)
        whole = {}
        for name, value in entries.items():
            # A rank may have no row of a weight that is cut.
            if aliases.get(name, name) not in in_shards and not _is_dtensor(value):
                whole[name] = value
        return whole

    def _listed_now(self, tensors: dict[str, Tensor]) -> Listing:
        """Return the listing of a checkpoint: the weights of the whole model, and what else it has.

        Forwards may change the shapes of buffers, and register new ones.
        """
        listed = {}
        for name, entry in self._listed.items():
            if entry[0] in WEIGHTS:
                listed[name] = entry
        buffers = buffer_names(self.model)
        for name, tensor in tensors.items():
            if name not in listed:
                kind = BUFFER if name in buffers else ENTRY
                listed[name] = _entry(kind, tensor)
        return listed

    def load(self, saved: StateDict, optimizer: bool = True, weights: bool = True) -> None:
        """Load what `pack` returned, in place. Raises CheckpointError for another optimizer or
        model.

        Of a sharded state, `saved.optimizer` has this rank's pieces. Without `optimizer` the
        optimizer keeps its state; without `weights` only those are loaded that `saved` has.
        """
        self._load_weights(saved, weights)
        self.can_finish = False

        # The saved model is the anchor: a replica's own weights are beside it.
        meta = saved.meta
        tensors, of_replica = without_outer(saved.optimizer)
        if self.outer is not None and weights:
            self.outer.load(self.shards, of_replica, meta.get("outer", {}), meta["step"])

        # Before its first step an optimizer has no state.
        values = meta.get("optimizer", {})
        kept = values.get("state", {})
        if optimizer and (tensors or kept or meta["step"] > 0):
            load_optimizer_tensors(self.optimizer, self.shards, tensors, kept, cut=self.sharded)
        for each in self.optimizers:
            load_groups(each, values.get("groups", []))
        if self.schedule:
            self.schedule.load_values(values.get("schedule"), meta["step"])
        elif "schedule" in values:
            raise CheckpointError(
                "the checkpoint has the state of a scheduler, but the script gives none; give "
                "RuntimeEngine the same scheduler, or start anew with resume none"
            )
        self.scaler.load_values(saved.scaler)

        # A checkpoint of an older nanoray has no scalars of its own: they are in its meta.
        if "scalars" in meta:
            values = dict(meta["scalars"])
            self.step = values.pop("step")
            self.samples = values.pop("samples")
            self.scalars = Scalars(**values)
        else:
            self.step = meta["step"]
            self.samples = meta["samples_seen"]
            self.scalars = Scalars(
                ema_step=meta["step"],
                val_loss=meta.get("val_loss"),
                best_val_loss=meta.get("best_val_loss"),
            )
        self.guards.load_values(meta.get("guards", {}))

        # The step's end was done before it was saved.
        step = self.step
        self.session = Session(begun=step, current=step, evaluated=step, reported=step, saved=step)

    def load_memory(
        self, saved: StateDict, rank: int, ranks: int, forget: Callable[[], None]
    ) -> bool:
        """Restore this rank's error-feedback memory; return False if it had to be reset.

        It is reset by `forget` when another number of ranks had saved it, or none. False also if
        `saved` has one and this run compresses nothing. The memory is removed from `saved`: for
        each rank, it is as large as the weights.

        `forget` is passed in because this state outlives a group of ranks: a reference to an object
        with the group would keep its connections open, and other ranks notice that a rank has left
        when they close.
        """
        memories = [of_rank.pop(MEMORY, None) for of_rank in saved.rng]
        if self.memory is None:
            return all(memory is None for memory in memories)

        own = memories[rank] if len(memories) == ranks else None
        if own is None or own.shape != self.memory.shape:
            forget()
            return False
        self.memory.copy_(own)
        return True

    def global_weights(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model have the weights inside that a checkpoint would contain. (all ranks)

        `changed` is called after shards have changed, and sends them to the ranks that need them.
        """
        if self.outer is None:
            return nullcontext()
        return self.outer.in_model(self.shards, self.step, changed)

    def replica_values(self) -> dict[str, Tensor]:
        """Return what only this rank's replica has of a state, besides tensors of parameters."""
        if self.outer is None:
            return {}
        values = [self.outer.joined, *self.scaler.values().values()]
        return {REPLICA: torch.tensor(values, dtype=torch.float64)}

    def load_replica_values(self, saved: StateDict, rank: int, ranks: int) -> None:
        """Put this replica's values in the place of those of the rank that saved the others.

        Equally many ranks must have saved them: else all go on with those of the first rank.
        """
        of_ranks = [of_rank.pop(REPLICA, None) for of_rank in saved.rng]
        own = of_ranks[rank] if len(of_ranks) == ranks else None
        if own is None or self.outer is None:
            return
        joined, *scaler = own.tolist()
        saved.meta["outer"]["joined"] = int(joined)
        if scaler:
            saved.scaler = dict(zip(saved.scaler, scaler, strict=True))

    @torch.no_grad()
    def _load_weights(self, saved: StateDict, strict: bool) -> None:
        """Copy weights, buffers and extra states.

        With `strict` a whole model must find all of its own. Raises CheckpointError for a state of
        another model.
        """
        if strict:
            self._refuse_other_model(saved)
        if self.weights is not None:
            for shard in self.weights:
                # A state that comes from another rank has no weights.
                if shard.piece.name in saved.model:
                    shard.param.copy_(saved.model[shard.piece.name].view_as(shard.param))
            self._load_whole_tensors(saved)
            return

        # As plain torch does, with the hooks that a module may have. Buffers first get their shapes.
        self._write_buffers(saved)
        tensors, values = entries_of(saved, self._device)
        own = self.model.state_dict()
        for name in own.keys() - tensors.keys() - values.keys():
            if name.endswith("num_batches_tracked"):
                tensors[name] = own[name]  # older checkpoints have none
        try:
            self.model.load_state_dict(tensors | values, strict=strict)
        except RuntimeError as error:
            # torch lists everything on lines of its own.
            text = " ".join(str(error).split())
            raise CheckpointError(
                f"the checkpoint does not fit this model: {text:.300}; resume with the model that "
                "wrote it"
            ) from None

    def _load_whole_tensors(self, saved: StateDict) -> None:
        """Copy what no rank has cut of a model that is cut: buffers, extra states, some weights."""
        self._write_buffers(saved)
        tensors, values = entries_of(saved, self._device)
        buffers = self.buffers
        for name, own in self._whole_entries(keep_vars=True).items():
            if name not in tensors:
                continue
            if name.rpartition(".")[2] == EXTRA:
                values[name] = tensors[name]
            elif name not in buffers:
                assign(own, tensors[name])
        set_extra_states(self.model, values)

    def _write_buffers(self, saved: StateDict) -> None:
        """Give the model the buffers that were saved, in their shapes."""
        if "tensors" not in saved.meta:  # a checkpoint of an older nanoray
            for name, buffer in self.buffers.items():
                if name in saved.model:
                    assign(buffer, saved.model[name])
            return
        names = []
        for name, (kind, _, _) in saved.meta["tensors"].items():
            if kind == BUFFER and name in saved.model:
                names.append(name)
        write_buffers(self.model, saved.model, names, self._device)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _refuse_other_model(self, saved: StateDict) -> None:
        """Raise CheckpointError when the saved weights are others, or others were trained."""
        listed: Listing = saved.meta.get("tensors", {})
        if not listed:
            return
        before = {name: entry for name, entry in listed.items() if entry[0] in WEIGHTS}
        now = {name: entry for name, entry in self._listed.items() if entry[0] in WEIGHTS}
        for names, where in (
            (before.keys() - now.keys(), "only in the checkpoint"),
            (now.keys() - before.keys(), "not in the checkpoint"),
        ):
            if names:
                raise CheckpointError(
                    f"the checkpoint is of another model: {_first_of(names)} {where}; resume with "
                    "the model that wrote it"
                )

        shapes = [name for name in now if before[name][2] != now[name][2]]
        if shapes:
            name = min(shapes)
            raise CheckpointError(
                f"the checkpoint is of another model: {name} has the shape {before[name][2]} there "
                f"and {now[name][2]} here; resume with the model that wrote it"
            )
        changed = {name for name in now if before[name][0] != now[name][0]}
        if changed:
            name = min(changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise CheckpointError(
                f"other weights were trained in the checkpoint: {name} ({before[name][0]} there, "
                f"{now[name][0]} here){more}; resume with the same ones, or begin a new run from "
                "the weights: nanoray checkpoint export, then load_state_dict"
            )

    def follow(self, packed: StateDict) -> None:
        """Take over the rounds that another replica has finished; keep the own weights otherwise."""
        assert self.outer is not None
        _, of_replica = without_outer(packed.optimizer)
        values = packed.meta["outer"]
        self.outer.follow(self.shards, packed.model, of_replica, values, self.step)

    def rewind(self, saved: StateDict, samples: int) -> None:
        """Go back to `saved` and continue with the data from `samples`. Clock and guards keep their
        values.
        """
        before = self.scalars
        guards = self.guards.values()
        first_step_s = self.session.first_step_s
        self.load(saved)
        self.samples = samples
        self.scalars.train_s = before.train_s
        self.scalars.timed_steps = before.timed_steps
        self.guards.load_values(guards)
        self.session.first_step_s = first_step_s


def share(state: TrainState, mesh: Mesh, source: int) -> None:
    """Copy the whole state of rank `source` to all ranks, tensor by tensor. (all ranks)

    Nothing is read from disk. Afterwards every rank has the source's parameters, optimizer, scaler,
    guards, scalars and session. Where weights or optimizer state are sharded, each rank keeps its
    own. Of replicas that rarely communicate only those take it over that are not `whole`.
    """
    packed, session = fetch(state, mesh, source)
    # A replica that rarely communicates keeps its own weights, unless it is to be healed.
    keeps_own = state.outer is not None and state.whole
    if mesh.rank != source and not keeps_own:
        state.load(packed, optimizer=not state.sharded)
        if state.outer is not None:
            state.outer.joined = state.step
    state.session = session
    state.whole = True


def fetch(
    state: TrainState, mesh: Mesh, source: int, pieces: bool = True
) -> tuple[StateDict, Session]:
    """Return the state and session of rank `source`, without its shards if it is sharded. (all
    ranks)

    Nothing is loaded yet. Without `pieces` it leaves out all that an optimizer updates.
    """
    is_source = mesh.rank == source
    packed = state.pack() if is_source else StateDict({}, {})
    if not pieces:
        packed.model = state.without_owner(packed.model)
        packed.optimizer = {}

    # The source lists its tensors: tied weights once, under their first name.
    aliases = _aliases(state.model)
    tensors: dict[tuple[str, str], Tensor] = {}
    for name, tensor in packed.model.items():
        if aliases.get(name, name) == name:
            tensors["model", name] = tensor
    for name, tensor in packed.optimizer.items():
        tensors["optimizer", name] = tensor
    # Plain torch sends these at the start as well. They are in no checkpoint.
    transient = buffers_of(state.model, persistent=False)
    for name, buffer in transient.items():
        tensors["transient", name] = buffer.tensor
    layout = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]

    # Small values in one message, then each tensor in the order of that list.
    layout, packed.scaler, packed.meta, session, aliases = mesh.broadcast(
        (layout, packed.scaler, packed.meta, asdict(state.session), aliases), src=source
    )
    for key, shape, dtype in layout:
        if not is_source:
            tensors[key] = torch.empty(shape, dtype=dtype, device=mesh.device)
        mesh.broadcast_tensor(tensors[key].to(mesh.device), source)

    if not is_source:
        for (part, name), tensor in tensors.items():
            if part == "model":
                packed.model[name] = tensor
            elif part == "optimizer":
                packed.optimizer[name] = tensor
            elif name in transient:
                assign(transient[name].tensor, tensor)
        # All names of a tied weight get the same tensor again.
        for name, first in aliases.items():
            if first in packed.model:
                packed.model[name] = packed.model[first]
    return packed, Session(**session)


def entries_of(saved: StateDict, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the entries of the model's state_dict: those that are tensors, and the others."""
    encoded = saved.meta.get("entries", {})
    values = join(encoded, saved.model, device)
    within = set(tensors_within([*encoded.values()]))
    tensors = {}
    for name, tensor in saved.model.items():
        if name not in within:
            tensors[name] = tensor
    return tensors, values


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
    """Return each name of the model's state with the first name of the same tensor.

    Tied weights have several names, and are sent once.
    """
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            aliases[name] = first.setdefault(id(tensor), name)
    return aliases


def _listing(model: nn.Module) -> Listing:
    """Return kind, dtype and shape of each tensor in the state_dict of a whole model."""
    weights = {id(p): p.requires_grad for p in model.parameters()}
    buffers = buffer_names(model)
    listed = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        kind = BUFFER if name in buffers else ENTRY
        if id(tensor) in weights:
            kind = TRAINED if weights[id(tensor)] else FROZEN
        listed[name] = _entry(kind, tensor)
    return listed


def _entry(kind: str, tensor: Tensor) -> list[Any]:
    return [kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _first_of(names: Collection[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{min(names)}{more}"


def _is_dtensor(value: Any) -> bool:
    """Whether fully_shard has cut a tensor. Asked in this way, because DTensor's import is slow."""
    return hasattr(value, "to_local")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> dict[str, Tensor]:
    """Return the optimizer's state as one flat dict with names such as `exp_avg.<parameter>`."""
    return tensors_of(optimizer, _names_of(shards))


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[Shard],
    tensors: dict[str, Tensor],
    values: dict[str, Any] | None = None,
    cut: bool = False,
) -> None:
    """Restore what `optimizer_tensors` returned, in place on each parameter's device.

    `values` are those of `values_of`; with `cut` the tensors are flat pieces. Raises
    CheckpointError when the state belongs to another optimizer or to other parameters.
    """
    params = {shard.piece.name: shard.param for shard in shards}
    load_tensors(optimizer, params, tensors, values or {}, cut)


def _names_of(shards: Sequence[Shard]) -> dict[Tensor, str]:
    return {shard.param: shard.piece.name for shard in shards}
