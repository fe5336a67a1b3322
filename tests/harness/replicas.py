"""Rarely communicating replicas in one process, after the papers: what tests compare a run with.

The inner steps are torch's own; the outer optimizer is torch.optim.SGD with nesterov=True over the
anchor, whose gradient is the mean of (anchor - weights).
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanoray.checkpoint.run import RunSpec
from nanoray.config import Batch, Config, resolve_batch
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.state.outer import fragments_of
from nanoray.train.optim.groups import lr_at, make_optimizer, set_lr
from nanoray.train.tasks import task_of

CPU = torch.device("cpu")
TRAVELS = 2  # steps for which a fragment travels


@dataclass
class Replica:
    """One replica: a model, its optimizer, and the weights that it has sent."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    joined: int = 0
    sent: dict[str, Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class Simulation:
    """All replicas of a run, one after the other."""

    def __init__(self, spec: RunSpec, replicas: int, group: int = 1) -> None:
        """group: the data ranks of each replica, which average their gradients in every step."""
        self.config: Config = spec.config
        self.batch: Batch = resolve_batch(self.config, replicas * group)
        self._group = group
        task = task_of(spec)
        self._data = task.data(CPU)
        torch.manual_seed(self.config.seed)
        first = task.model()
        self.replicas: list[Replica] = []
        for _ in range(replicas):
            model = copy.deepcopy(first)
            self.replicas.append(Replica(model, make_optimizer(model, self.config)))

        self.anchor = {name: nn.Parameter(p.detach().clone()) for name, p in self.weights_of(0)}
        sizes = {name: p.numel() for name, p in self.anchor.items()}
        self.fragments = fragments_of(sizes, self.config.sync_fragments)
        self.synced = [0] * len(self.fragments)
        momentum = self.config.outer_momentum
        self.outer = torch.optim.SGD(
            self.anchor.values(),
            lr=self.config.outer_lr,
            momentum=momentum,
            nesterov=momentum > 0,
            foreach=False,
        )
        self.step = 0
        self.left_out: Collection[tuple[int, int]] = ()  # steps whose update a replica leaves out
        self.losses: dict[int, float] = {}  # means over the replicas

    def weights_of(self, replica: int) -> list[tuple[str, nn.Parameter]]:
        return list(self.replicas[replica].model.named_parameters())

    def train(self, steps: int, replaced: Collection[tuple[int, int, int]] = ()) -> None:
        """Do so many steps. `replaced`: which replica begins anew from which one after which step.

        The step is negative where the replica was lost in the exchange after it.
        """
        for _ in range(steps):
            losses = [self._inner_step(rank) for rank in range(len(self.replicas))]
            self.losses[self.step + 1] = sum(losses) / len(losses)
            self.step += 1
            self._replace(replaced, -self.step)
            self._exchange()
            self._replace(replaced, self.step)

    def _replace(self, replaced: Collection[tuple[int, int, int]], now: int) -> None:
        for step, replica, source in replaced:
            if step == now:
                self.replace(replica, source)
        # Where all that had begun a round are lost, the source stands for them.
        for step, _, source in replaced:
            joined = [replica.joined for replica in self.replicas]
            if step == now and min(joined) > min(self.synced):
                self.replicas[source].joined = min(self.synced)

    def replace(self, replica: int, source: int) -> None:
        """Let a replica begin anew with the state of another one."""
        other = self.replicas[source]
        model = copy.deepcopy(other.model)
        optimizer = make_optimizer(model, self.config)
        optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.replicas[replica] = Replica(model, optimizer, self.step, copy.deepcopy(other.sent))

    def _inner_step(self, rank: int) -> float:
        config = self.config
        replica = self.replicas[rank]
        set_lr([replica.optimizer], lr_at(self.step, config))
        total = torch.zeros(())
        micro_size, accum, ranks = self.batch
        for micro in range(accum):
            for data_rank in range(rank * self._group, (rank + 1) * self._group):
                start = (
                    self.step * self.batch.global_size + (micro * ranks + data_rank) * micro_size
                )
                x, y = self._data.train_batch(start, micro_size)
                if config.dropout:
                    seed_generators(derive_seed(config.seed, self.step, micro, data_rank), CPU)
                loss = replica.model(x, y)
                total += loss.detach()
                (loss / (accum * self._group)).backward()
        if config.grad_clip:
            nn.utils.clip_grad_norm_(replica.model.parameters(), config.grad_clip)
        if (self.step + 1, rank) not in self.left_out:
            replica.optimizer.step()
        replica.optimizer.zero_grad(set_to_none=True)
        return (total / (accum * self._group)).item()

    def _exchange(self) -> None:
        every = self.config.sync_every
        last = self.step == self.config.max_steps
        travels = 0 if len(self.fragments) == 1 else TRAVELS
        for number in range(len(self.fragments)):
            offset = number * every // len(self.fragments)
            # What was sent is applied after it has travelled, or at the end of all.
            for sent_at in range(max(0, self.step - travels), self.step):
                due = sent_at >= offset and (sent_at - offset) % every == 0
                due = due and sent_at > self.synced[number]
                if due and (self.step - sent_at == travels or last):
                    self._apply(number, sent_at)
            if last or (self.step >= offset and (self.step - offset) % every == 0):
                self._send(number)
                if travels == 0 or last:
                    self._apply(number, self.step)

    def _send(self, fragment: int) -> None:
        for replica in self.replicas:
            for name in self.fragments[fragment]:
                replica.sent[name] = replica.weights[name].clone()

    def _apply(self, fragment: int, sent_at: int) -> None:
        counting = [r for r in self.replicas if r.joined <= self.synced[fragment]]
        for name in self.fragments[fragment]:
            anchor = self.anchor[name]
            differences = []
            for replica in counting:
                differences.append(self._rounded(anchor.detach() - replica.sent[name]))
            mean = sum(differences[1:], differences[0]) / len(differences)
            anchor.grad = self._rounded(mean)
        # Only the parameters of this fragment have a gradient.
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self.synced[fragment] = sent_at
        for replica in self.replicas:
            for name in self.fragments[fragment]:
                sent = replica.sent.pop(name)
                if sent_at == self.step:
                    replica.weights[name].copy_(self.anchor[name].detach())
                else:
                    replica.weights[name].add_(self.anchor[name].detach() - sent)

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Return what 8 bits leave of a tensor: each 1024 numbers are multiples of one scale."""
        if self.config.sync_bits == 32:
            return tensor
        rounded = torch.empty_like(tensor)
        for numbers, out in zip(
            tensor.flatten().split(1024), rounded.view(-1).split(1024), strict=True
        ):
            scale = numbers.abs().max() / 127
            out.zero_()
            if scale > 0:
                out.copy_(torch.round(numbers / scale) * scale)
        return rounded
