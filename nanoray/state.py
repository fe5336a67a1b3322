"""The state of a run: everything that a step changes and that the next step needs, on any rank.

    TrainState   model, optimizer, scaler, guards (parts) + step, samples, losses, clock (scalars)
       │  pack()  ─► StateDict ─► a checkpoint's files
       │                      └─► a newcomer's memory, over the process group (share)
       └─ load()  ◄─ StateDict ◄─ a resume, a rollback, a recovery

One serialiser serves all of them, and the tensors that it packs are the tensors that replicas compare by hash.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoray.errors import CheckpointError
from nanoray.mesh.mesh import Mesh

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
    """A TrainState as plain data. `meta` holds `step` and anything else that is JSON."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]  # flat names: "exp_avg.<param>", "step.<param>"
    rng: list[dict[str, Tensor]] = field(default_factory=list)  # per rank: the generators' states as bytes
    scaler: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scalars:
    """What a resumed run continues with, besides tensors."""

    step: int = 0  # completed optimizer steps
    samples: int = 0  # sequences consumed by them: the one cursor of the data
    loss: float | None = None  # of the newest logged step, mean over all ranks
    loss_ema: float | None = None  # exponential moving average of the logged losses, EMA_DECAY per step
    ema_step: int = 0  # the step of the newest loss in it
    val_loss: float | None = None
    best_val_loss: float | None = None
    train_s: float = 0.0  # seconds spent in timed steps, over all parts of the run
    timed_steps: int = 0


@dataclass
class Session:
    """What one command knows about its run. It survives the loss of a rank, and starts anew after a resume.

    The step fields record what has been done at the end of the newest step. So an interrupted end can be repeated:
    nothing is reported twice and nothing is skipped.
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


class TrainState:
    """One rank's copy of the state of a run. The data axis replicates it whole; no other axis exists yet."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Part, guards: Part) -> None:
        """Take the parts as they are at step 0. `whole` is set once they hold the state of the run."""
        self.model, self.optimizer, self.scaler, self.guards = model, optimizer, scaler, guards
        self.scalars, self.session = Scalars(), Session()
        self.whole = False  # whether other ranks may copy this state: only after a resume or recovery is done

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.scalars.step

    @property
    def samples(self) -> int:
        """Sequences consumed by them."""
        return self.scalars.samples

    def advance(self, samples: int) -> None:
        """Count a completed step of `samples` sequences."""
        self.scalars.step += 1
        self.scalars.samples += samples

    def see_loss(self, loss: float, smooth: bool) -> None:
        """Record a logged step's mean loss; `smooth` adds it to the moving average.

        A resumed run logs its first step besides the regular ones. The average leaves that loss out, so that it equals
        the average of an uninterrupted run.
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
        """Return, in one order on all ranks, the live tensors that must be equal on all replicas."""
        tensors = {name: p.detach() for name, p in self.model.named_parameters()}
        tensors |= dict(sorted(optimizer_tensors(self.optimizer, self.model).items()))
        return tensors | self.scaler.tensors()

    def pack(self, rng: list[dict[str, Tensor]] | None = None) -> StateDict:
        """Return the state as data. The tensors are the live ones, which the next step changes."""
        s = self.scalars
        return StateDict(
            model=self.model.state_dict(),
            optimizer=optimizer_tensors(self.optimizer, self.model),
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

    def load(self, saved: StateDict) -> None:
        """Load what `pack` returned, in place. Raises CheckpointError for another optimizer or model.

        A checkpoint of an older nanoray has no scalars of its own; step, cursor and losses are in its meta.
        """
        self.model.load_state_dict(saved.model)
        if saved.optimizer or saved.meta["step"] > 0:  # before its first step an optimizer has no state
            load_optimizer_tensors(self.optimizer, self.model, saved.optimizer)
        self.scaler.load_values(saved.scaler)
        meta = saved.meta
        old = {"step": meta["step"], "samples": meta["samples_seen"], "ema_step": meta["step"]}
        old |= {key: meta.get(key) for key in ("val_loss", "best_val_loss")}
        self.scalars = Scalars(**meta.get("scalars", old))
        self.guards.load_values(meta.get("guards", {}))
        step = self.step
        self.session = Session(begun=step, current=step, evaluated=step, reported=step, saved=step)

    def rewind(self, saved: StateDict, samples: int) -> None:
        """Go back to `saved` and continue with the data from `samples`. Clock and guards keep their values."""
        now, guards, first_step_s = self.scalars, self.guards.values(), self.session.first_step_s
        self.load(saved)
        self.scalars.samples = samples
        self.scalars.train_s, self.scalars.timed_steps = now.train_s, now.timed_steps
        self.guards.load_values(guards)
        self.session.first_step_s = first_step_s


def share(state: TrainState, mesh: Mesh, source: int) -> None:
    """Copy the whole state of rank `source` to all ranks, tensor by tensor. (all ranks)

    Nothing is read from disk. Afterwards every rank has the source's parameters, optimizer, scaler, guards, scalars and
    session.
    """
    own = mesh.rank == source
    packed = state.pack() if own else StateDict({}, {})
    aliases = _aliases(state.model)
    tensors = {("model", name): packed.model[name] for name in {*aliases.values()} if own}
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
        packed.model = {name: tensors["model", first] for name, first in aliases.items()}
        packed.optimizer = {name: tensor for (part, name), tensor in tensors.items() if part == "optimizer"}
        state.load(packed)
    state.session, state.whole = Session(**session), True


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
    """Return each name of the model's state with the first name of the same tensor: tied weights travel once."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as one flat dict with names such as `exp_avg.<parameter>`."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{key}.{names[p]}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned, in place on each parameter's device.

    Raises CheckpointError when the state belongs to another optimizer or to other parameters.
    """
    params = dict(model.named_parameters())
    expected = {"exp_avg", "exp_avg_sq", "step"} if isinstance(optimizer, torch.optim.AdamW) else set()
    found = {name.split(".", 1)[0] for name in tensors}
    if found != expected:
        raise CheckpointError(
            f"optimizer state holds {sorted(found) or 'nothing'}, but {type(optimizer).__name__} needs "
            f"{sorted(expected) or 'nothing'}; resume with the optimizer that wrote it"
        )
    for name, tensor in tensors.items():
        key, param = name.split(".", 1)
        if param not in params or (key != "step" and tensor.shape != params[param].shape):
            raise CheckpointError(f"optimizer state {name} {tuple(tensor.shape)} does not fit this model's parameters")
        optimizer.state[params[param]][key] = tensor.to(params[param].device, copy=True)
