"""One way to train a model on this rank.

The benchmarks that compare arms train it (engine.py). A case is a model with its
batches; an arm trains it by a plan, as the loop does, without guards and records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoray.config import Config, resolve_batch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from nanoray.parallel.mesh import Mesh


@dataclass
class Case:
    """What is trained: a model on this rank's device, and what the benchmark has to know about it."""

    model: nn.Module
    # Of a micro batch, by its number: inputs and targets of this rank
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int  # of a micro batch
    tokens: int  # of a sample
    activations: dict[str, int]  # bytes by part, at the peak of a step
    what: str


def gpt(mesh: Mesh, config: Config, precision: str, micro: int, vocab_size: int = 0) -> Case:
    """Return a GPT with random tokens: a step has the same samples, however the ranks share them.

    vocab_size: 0 takes the one that the tokenizer has before a text is read.
    """
    import torch

    from nanoray.cli.forecast.rank_memory import stage_activations
    from nanoray.data.tokenizer import VOCAB
    from nanoray.models.build import gpt_of
    from nanoray.models.costs import count_parameters
    from nanoray.models.gpt import ModelShape

    shape = ModelShape.of(config, vocab_size or VOCAB[config.tokenizer])
    layout = mesh.layout
    at = layout.coords(mesh.rank)
    torch.manual_seed(config.seed)
    model = gpt_of(shape, config).to(mesh.device)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        first = (number * layout.dp + at.dp) * micro
        source = torch.Generator()
        size = (config.block_size + 1,)
        rows = [
            torch.randint(shape.vocab_size, size, generator=source.manual_seed(first + i))
            for i in range(micro)
        ]
        tokens = torch.stack(rows)
        return tokens[:, :-1].to(mesh.device), tokens[:, 1:].to(mesh.device)  # (B, T) each

    what = f"GPT of {count_parameters(shape):,} parameters, {config.n_layer} blocks of width {config.n_embd}"
    activations = stage_activations(
        config, shape, resolve_batch(config, layout.dp), precision, at.pp
    )
    return Case(model, batch, micro, config.block_size, activations, what)


# (mesh, configuration, precision, micro batch size)
MakeCase = Callable[["Mesh", Config, str, int], Case]


def alone_on(mesh: Mesh) -> Mesh:
    """Return the mesh of this rank alone: the same code, without communication."""
    from nanoray.parallel.mesh import Mesh

    return Mesh(0, 1, 0, mesh.device, "none", "alone")


class Arm:
    """One way to train a case on this rank: the steps of the loop, without its guards and records."""

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        make: MakeCase,
        traced: bool = False,
        mirrored: bool = False,
        drops: bool = False,
    ) -> None:
        """Make model, plan and optimizers, and warm them up. (all ranks)

        `mirrored` sizes the buffers as with --mirror on one node. `drops`: with the dropout of the
        configuration; else without any.
        """
        from nanoray.bench.peak_memory import model_memory, peak_memory
        from nanoray.config.layout import Layout
        from nanoray.models.precision import LossScaler, MeanLoss
        from nanoray.observe.trace.recorder import CommRecorder
        from nanoray.parallel.ddp import default_bucket_mb
        from nanoray.parallel.plan import Plan
        from nanoray.train.agree import agree_on_precision, resolve_precision, resolved
        from nanoray.train.optim.groups import make_optimizer

        if not drops:
            config = config.model_copy(update={"dropout": 0.0})
        precision, _ = agree_on_precision(mesh, resolve_precision(config, mesh))
        config = resolved(config, mesh, precision, {})
        # The arms of a benchmark divide the same ranks differently.
        layout = Layout.of(config, mesh.world_size)
        mesh = replace(mesh, layout=layout)
        batch = resolve_batch(config, layout.dp)
        self.mesh = mesh
        self.config = config
        self.accum = batch.accum
        self.clip = config.grad_clip
        self.trained = 0
        self.case = make(mesh, config, precision, batch.micro)
        # Bytes of a micro batch between two stages: a rank sends its own part of the sequences.
        stream = 4 * batch.micro * config.block_size * config.n_embd // config.cp
        if config.pp > 1:
            self.messages = {"send_recv activations": (batch.accum, batch.accum * stream)}
        else:
            self.messages = {}
        bucket_mb = config.bucket_mb or default_bucket_mb(mesh.device)
        loss = MeanLoss(mesh.device.type, precision)
        unscaled = LossScaler(mesh.device, enabled=False)
        self.plan = Plan(self.case.model, mesh, config, batch.accum, loss, unscaled, int(mirrored))
        shared_by = layout.shard_size
        state = model_memory(config, self.case.model, shared_by, batch.accum, bucket_mb, mirrored)
        self.formula = state | self.case.activations
        self.dp = batch.dp
        of_model = config, self.case.model, shared_by, state, self.case.activations
        self.at_peak = peak_memory(*of_model, bucket_mb, batch.accum)
        self.optimizer = make_optimizer(self.case.model, config, self.plan.shards)
        mirrored_shards = self.plan.mirror_shards
        self.mirror: Optimizer | None = None
        if mirrored_shards:
            self.mirror = make_optimizer(self.case.model, config, mirrored_shards)
        self.recorder = CommRecorder(mesh, every=1)
        if traced:
            self.plan.add_twin(self.recorder.hook)
        self.plan.warm_up(*self._micro_batch(0))
        self.recipe = (
            f"{self.case.what}, {precision}, {batch.accum} × {batch.micro} samples a rank and step"
        )

    def _micro_batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of a micro batch."""
        from nanoray.data.sequence_part import own_parts

        x, y = self.case.batch(number)
        if self.plan.part is None:
            return x, y
        return own_parts(self.plan.part, x, y)

    def _seed_dropout(self, micro: int) -> None:
        """Let a micro batch draw the masks that it draws in a run, in every arm."""
        from nanoray.models.dropout import derive_seed, seed_generators

        if self.config.dropout:
            data_rank = self.plan.data_rank
            seed = derive_seed(self.config.seed, self.trained, micro, data_rank)
            seed_generators(seed, self.mesh.device)

    def step(self) -> None:
        """Train one step; the gradients stay. (all ranks)"""
        first = self.trained * self.accum
        micro_batches = (self._micro_batch(first + i) for i in range(self.accum))
        self.loss = self.plan.forward_backward(
            micro_batches, self.recorder.phase, self._seed_dropout
        )
        self.recorder.phase("optimizer")
        self.plan.complete_gradients()
        self.norm = self.plan.grad_norm()
        if self.clip:
            self.plan.clip(self.clip, self.norm)
        self.optimizer.step()
        if self.mirror:
            self.mirror.step()
        self.plan.spread()
        self.trained += 1  # also the number of the next step's batch

    def step_by_phases(self) -> list[Any]:
        """Train one step; return this rank's phases, waiting for another stage among them. (all ranks)"""
        self.recorder.begin(0)
        self.step()
        self.recorder.end()
        self.recorder.clock.anchor()
        (notes,) = self.recorder.read()
        return list(notes["phases"])

    def digests(self) -> list[int]:
        """Return a number of each rank that changes with a bit of its weights. (all ranks)"""
        from nanoray.train.guard.replicas import combine, hash_tensors

        weights = {name: p.detach() for name, p in self.case.model.named_parameters()}
        return self.mesh.all_gather(combine(hash_tensors(weights)[1]))

    def traced_step(self) -> dict[str, Any]:
        """Train one step and return what its communication costs this rank. (all ranks)

        With a pipeline that includes waiting for another stage, and what the first stage sends: no
        collectives.
        """
        from nanoray.observe.trace.comm_log import IDLE
        from nanoray.observe.trace.costs import Collective, account
        from nanoray.observe.trace.recorder import wait_for

        self.plan.trace(True)
        self.mesh.listener = self.recorder
        self.recorder.begin(0)
        self.step()
        self.plan.settle()
        self.recorder.end()
        self.mesh.listener = None
        self.plan.trace(False)
        self.plan.zero_grad()
        wait_for(self.mesh.device)
        self.recorder.clock.anchor()
        (notes,) = self.recorder.read()
        seen = [Collective(**c) for c in notes["collectives"]]
        waiting = sum(end - start for name, start, end in notes["phases"] if name == IDLE)
        cost = account(seen)
        sizes = Counter[str]()
        on_axes = Counter[str]()  # the bytes of all tensors, by axis and operation
        for c in seen:
            sizes[f"{c.op} {c.what}"] += c.size_bytes
            on_axes[f"{c.group} {c.op}"] += c.size_bytes
        counts = Counter(f"{c.op} {c.what}" for c in seen)
        sent = {name: (counts[name], size) for name, size in sizes.items()} | self.messages
        times = {
            "busy_ms": 1e3 * (cost.busy + waiting),
            "exposed_ms": 1e3 * (cost.exposed + waiting),
        }
        largest = max((c.size_bytes for c in seen), default=0)
        return times | {"collectives": sent, "on_axes": dict(on_axes), "largest": largest}
