"""Pipeline parallelism by hand: each rank of an axis has some layers, and micro batches pass from
rank to rank.

With pp = 2 and six layers; x is the residual stream (B, T, C) of one micro batch, dx its gradient:

    1f1b, gpipe     rank 0   tok_emb pos_emb  0 1 2 ── x ──►                    rank 1   3 4 5  norm lm_head ─► loss
                                                    ◄── dx ──

    interleaved     rank 0   tok_emb pos_emb  0 ─ x ►   2 ─ x ►   4 ─ x ►        three chunks on each rank: the stream
    3 chunks        rank 1                    1 ─ x ►   3 ─ x ►   5  norm lm_head    passes every rank three times

`schedules.py` lists the turns of each rank, and the messages of each tick. All ranks read the same
timetable, so both sides of a message agree on it: one batch of messages per tick.

    F   receive x from the part before (the first part embeds tokens), compute, keep the graph, send x on
    B   receive dx from the part after (the last part has the loss), backward through the kept graph, send dx back
    W   in zero_bubble: the gradients of weights, which B then leaves out (zero_bubble.py)

What involves several stages:

    loss        the last stage has it, and applies the mean's factor and fp16's scale; a sum of 4 bytes gives it to all
    tied        tok_emb.weight is on the first stage, lm_head.weight is the same parameter on the last one. Each
    embedding   computes a part of its gradient: after the last turn they exchange and add them (V, C), before the norm.
                So both copies get the same update. The first stage owns it: it saves it, and counts it in the norm
    norm        the sum over all ranks of what each of them owns
    routers     of experts have losses of their own: those of a stage enter at its own backward, with the same factor
    dropout     seeded by step, micro batch and layer, so no schedule changes a mask

With tensor parallelism each stage is cut first, and the ranks with the same shard are one pipeline.
Data parallelism sums the gradients of a chunk over the replicas of a stage while its last backward
of a step runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.gpt import GPT
from nanoray.models.precision import LossScaler
from nanoray.parallel.axis import Axis
from nanoray.parallel.flow import Flow, Loss, MicroBatch, Phase, Seed
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.pieces import Shard, whole_pieces
from nanoray.parallel.schedules import Turn, bubble, last_half, messages, timetable
from nanoray.parallel.zero_bubble import WeightGradients

TIED = "tok_emb.weight"


class Stage(GPT):
    """The layers of one rank, in chunks. They keep the names that they have in the whole model."""

    parts: list[range]  # the layers of each of this rank's chunks
    first: bool  # whether chunk 0 embeds tokens
    last: bool  # whether the last chunk ends in the loss
    aside: Tensor | None = None  # routers' losses of the newest forward that ended in the stream

    def forward(self, x: Tensor, targets: Tensor | None = None, chunk: int = 0) -> Tensor:  # type: ignore[override]
        """Run one chunk on the residual stream x (B, T, C); the model's first part takes tokens (B, T).

        Returns the stream, or at the end of the model the mean cross entropy, given targets (B, T).
        """
        has_dropout = self.training and self.dropout.p > 0
        seed = torch.initial_seed() if has_dropout else 0
        routed: dict[int, Tensor] = {}  # statistics of each layer's router

        if self.first and chunk == 0:
            x = self.embed(x)  # (B, T, C)

        for n in self.parts[chunk]:
            # A seed per layer: the masks do not depend on which layers this rank has computed.
            if has_dropout:
                seed_generators(derive_seed(seed, n), x.device)
            x = self.blocks[n](x, None)  # (B, T, C)
            if self.routing:
                x, routed[n] = x

        routing = self.routing if self.training else None
        if self.last and chunk == len(self.parts) - 1:
            assert targets is not None
            loss = self.lm_head.loss(self.norm(x), targets)
            return routing.added_to(loss, routed) if routing else loss

        # This part has no loss to which the routers' losses could be added: `Pipe` keeps them.
        self.aside = routing.losses(routed) if routing else None
        return x

    @property
    def tied(self) -> nn.Parameter | None:
        """The weight that the first and the last stage both have; None on the stages between."""
        return next(self.tok_emb.parameters(), None)

    def chunk_params(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each chunk in the model's order.

        The gradients of a chunk are complete at the same time, so it gets its own buckets.
        """
        chunks = []
        for part in self.parts:
            chunks.append([p for n in part for p in self.blocks[n].parameters()])
        if self.first:
            embeddings = [*self.tok_emb.parameters(), *self.pos_emb.parameters()]
            chunks[0] = embeddings + chunks[0]
        if self.last:
            chunks[-1] = [*self.tok_emb.parameters(), *chunks[-1], *self.norm.parameters()]
        return chunks


def split(model: nn.Module, stage: int, pp: int, chunks: int = 1) -> Stage:
    """Keep one stage's layers of a whole GPT, in place, and return it. Nothing is sent.

    All ranks must hold equal weights; meta tensors will do.
    """
    assert isinstance(model, GPT), "the table of conflicts refuses other models"
    pieces = whole_pieces(model)  # before layers go away, with the names of the whole model

    # Stage s has the chunks s, s + pp, s + 2·pp, ... of pp·chunks equal ones.
    size = model.shape.n_layer // (pp * chunks)
    starts = [(chunk * pp + stage) * size for chunk in range(chunks)]
    parts = [range(start, start + size) for start in starts]

    # Another stage's layer becomes an Identity: the layers that stay keep their numbers, and so
    # their names.
    elsewhere = nn.Identity()
    kept = {n for part in parts for n in part}
    for n in range(model.shape.n_layer):
        if n not in kept:
            model.blocks[n] = elsewhere

    # The first stage embeds positions and tokens, the last one has the norm and the output layer.
    # The output layer is tied to the token embedding, so both ends keep these two.
    first = stage == 0
    last = stage == pp - 1
    if not first:
        model.pos_emb = elsewhere
    if not last:
        model.norm = elsewhere  # type: ignore[assignment]
    if not (first or last):
        model.tok_emb = elsewhere  # type: ignore[assignment]
        model.lm_head = elsewhere  # type: ignore[assignment]

    model.__class__ = Stage
    model.parts = parts  # type: ignore[assignment]
    model.first = first  # type: ignore[assignment]
    model.last = last  # type: ignore[assignment]
    if model.routing:
        model.routing.stages = pp
    model.pieces = {name: pieces[name] for name, _ in model.named_parameters()}  # type: ignore[assignment]
    assert isinstance(model, Stage)
    return model


def with_tie(shards: Sequence[Shard], stage: int) -> list[Shard]:
    """Return a stage's shards with both holders of the tied embedding; the first stage owns it."""
    marked = []
    for shard in shards:
        if shard.piece.name == TIED:
            owner = shard.owner and stage == 0
            shard = replace(shard, holders=2 * shard.holders, owner=owner)
        marked.append(shard)
    return marked


class _Kept(NamedTuple):
    """What a forward leaves for its backward."""

    stream: Tensor | None  # what it received, (B, T, C); None for tokens
    made: Tensor  # the stream that it sent on, or the loss
    aside: Tensor | None  # its routers' losses, where `made` is not the loss


class Pipe(Flow):
    """One rank's share of a pipeline: it computes a stage's turns, and sends and receives by the
    timetable.
    """

    has_twin = False  # torch's DDP is in no pipeline of several replicas

    def __init__(
        self,
        stage: Stage,
        axis: Axis,
        kind: str,
        accum: int,
        loss: Loss,
        scaler: LossScaler,
        device: torch.device,
        parts: int = 1,
    ) -> None:
        """Lay out the turns of a step of `accum` micro batches by the schedule `kind`.

        parts: the ranks that share the positions of the stream.
        """
        super().__init__(stage, accum, loss, scaler, device)
        self._stage = stage
        self._axis = axis
        self._parts = parts
        self.chunks = len(stage.parts)
        self.has_loss = stage.last
        self.bubble = bubble(kind, axis.size, accum, self.chunks)

        # The turn that completes a micro batch: with zero_bubble, gradients of linear layers' weights
        # come in a half of their own, and `late` are these weights.
        self.last_half = last_half(kind)
        self._weights = WeightGradients(stage) if self.last_half == "W" else None
        self.late = None if self._weights is None else self._weights.params

        # This rank's turns, and the tick in which each of them runs; the messages of all ticks.
        table = timetable(kind, axis.size, accum, self.chunks)
        self.turns: list[Turn] = []
        self._tick_of: dict[Turn, int] = {}
        for tick, row in enumerate(table):
            turn = row[axis.index]
            if turn is not None:
                self.turns.append(turn)
                self._tick_of[turn] = tick
        self._messages = messages(table, axis.size, self.chunks)

        # The state of the step in progress.
        self._tick = 0  # the first one whose messages have not been started
        self._like = torch.empty(0)  # tokens (B, T) of this step: they give the stream's shape
        self._arriving: dict[Turn, Callable[[], Tensor]] = {}  # by the turn that needs the tensor
        self._received: Tensor | None = None  # for the next turn
        self._kept: dict[tuple[int, int], _Kept] = {}  # by chunk and micro batch
        self._sending: list[
            tuple[Callable[[], None], Tensor]
        ] = []  # a wait, and what must not change

    @property
    def whole(self) -> Callable[..., Tensor]:
        return self.evaluate

    def run(
        self, mode: DataParallel, micro_batches: Iterator[MicroBatch], phase: Phase, seed: Seed
    ) -> Tensor:
        """Run the turns of a step; return the mean of the losses on every stage. (all ranks)"""

        def scaled(loss: Tensor) -> Tensor:
            return self._scaler.scale(loss / (self._accum * mode.divisor))

        total = torch.zeros((), device=self._device)
        batches: dict[int, MicroBatch] = {}
        for turn in self.turns:
            is_last = turn.micro == self._accum - 1

            if turn.op == "F":
                # The first chunk reads the micro batch. Tokens and targets are kept until the last
                # chunk has run, because a stage may need either.
                if turn.chunk == 0:
                    phase("data")
                    batches[turn.micro] = next(micro_batches)
                x, y = batches[turn.micro]
                self.receive(turn, phase, x)
                with mode.forward(is_last):
                    phase("forward")
                    if seed:
                        seed(turn.micro)
                    loss = self.forward(turn, mode.wrapped, x, y)
                if loss is not None:
                    total += loss
                if turn.chunk == self.chunks - 1:
                    del batches[turn.micro]
                    del x, y
            else:
                # The last backward of a chunk exchanges its gradients, once its last half is done.
                self.receive(turn, phase)
                with mode.backward(is_last and turn.op == self.last_half, turn.chunk, self.late):
                    phase("backward")
                    self.backward(turn, scaled)
        return self.finish(total, phase) / self._accum

    def repeat(
        self, batch: Callable[[int], MicroBatch], seed: Seed, after: Callable[[int], None]
    ) -> None:
        for turn in self.turns:
            x, y = batch(turn.micro)
            self.receive(turn, _no_phase, x)
            if turn.op == "F":
                if seed:
                    seed(turn.micro)
                self.forward(turn, self._model, x, y)
            else:
                self.backward(turn, lambda loss: loss / self._accum)
            after(turn.micro)
        self.finish(torch.zeros((), device=self._device), _no_phase)

    def warm_up(self, mode: DataParallel, x: Tensor, y: Tensor) -> None:
        self.run(mode, itertools.repeat((x, y)), _no_phase, None)

    def receive(self, turn: Turn, phase: Phase, x: Tensor | None = None) -> None:
        """Wait for the tensor that a turn needs from another rank, if it needs one.

        x: tokens (B, T); the first turn of a step comes with them.
        """
        if x is not None:
            self._like = x

        # Ticks in which this rank computes nothing may have messages for it.
        while self._tick < self._tick_of[turn]:
            self._exchange()

        wait = self._arriving.pop(turn, None)
        self._received = None
        if wait is not None:
            phase("idle")
            self._received = wait()

    def _exchange(self, made: Tensor | None = None) -> None:
        """Start the messages of the next tick, in which this rank may have `made` something."""
        row = self._messages[self._tick]
        self._tick += 1
        own = self._axis.index
        sent = [(made, m.target) for m in row if m.source == own and made is not None]
        expected = [m for m in row if m.target == own]
        if not sent and not expected:
            return

        received = [(self._new_stream(self._like), m.source) for m in expected]
        all_sent, arrivals = self._axis.start_messages(sent, received, "activations")
        for message, arrived in zip(expected, arrivals, strict=True):
            self._arriving[message.turn] = arrived
        for tensor, _ in sent:
            self._sending.append((all_sent, tensor))

        # Free the memory of tensors that were sent some ticks ago. This wait cannot deadlock: their
        # receivers reach an earlier tick without this rank's help.
        self._wait_for_sent(but=2 * self._axis.size * self.chunks)

    def _new_stream(self, x: Tensor) -> Tensor:
        """Return an empty tensor for the stream of tokens x (B, T)."""
        B, T = x.shape
        return torch.empty(B, T // self._parts, self._stage.shape.n_embd, device=x.device)

    def forward(self, turn: Turn, model: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
        """Run a chunk's forward and send its stream on; return the mean loss at the model's end."""
        stream = self._received
        self._received = None
        if stream is not None:
            stream.requires_grad_()

        inputs = x if stream is None else stream
        made = self._loss(partial(model, chunk=turn.chunk), inputs, y)  # type: ignore[arg-type]
        assert isinstance(made, Tensor), "a script's model is in no pipeline"
        self._kept[turn.chunk, turn.micro] = _Kept(stream, made, self._stage.aside)
        self._stage.aside = None

        if self._is_end(turn.chunk):
            self._exchange()
            return made.detach()
        self._exchange(made.detach().contiguous())
        return None

    def backward(self, turn: Turn, scaled: Callable[[Tensor], Tensor]) -> None:
        """Run a chunk's backward and send the stream's gradient back.

        `scaled` applies the mean's factor and fp16's scale to a loss, so it enters at the end of
        the model, and at the routers' losses of every other chunk.
        """
        if turn.op == "W":
            assert self._weights
            self._weights.compute(turn.micro)
            self._exchange()  # other ranks' messages of this tick
            return

        stream, made, aside = self._kept.pop((turn.chunk, turn.micro))
        gradient = self._received
        self._received = None
        if gradient is None:  # `made` is the loss
            scaled(made).backward()
        elif aside is None:
            made.backward(gradient)
        else:
            torch.autograd.backward([made, scaled(aside)], [gradient, None])

        if self._weights:
            self._weights.keep(turn.micro)
        self._exchange(None if stream is None else stream.grad)

    def _is_end(self, chunk: int) -> bool:
        """Return whether a chunk of this rank ends in the loss."""
        return self._stage.last and chunk == self.chunks - 1

    def finish(self, loss: Tensor, phase: Phase) -> Tensor:
        """Wait until all is sent; return the loss of the last stage. (all ranks of the pipeline)"""
        phase("idle")
        assert not self._arriving
        assert not self._kept
        self._tick = 0
        self._wait_for_sent()
        return self._axis.sum(loss, "loss")

    def _wait_for_sent(self, but: int = 0) -> None:
        """Wait until all but the newest `but` tensors are sent, and release them."""
        while len(self._sending) > but:
            all_sent, _ = self._sending.pop(0)
            all_sent()

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other end's part of the tied embedding's gradient. (first and last stage)"""
        other = self._axis.size - 1 - self._axis.index
        theirs = torch.empty_like(gradient)
        all_sent, (arrived,) = self._axis.start_messages(
            [(gradient, other)], [(theirs, other)], "gradients"
        )
        # Both must end before the sum is written over what is being sent.
        arrived()
        all_sent()
        gradient += theirs

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch of any shape on the last stage, elsewhere 0. (all ranks
        of the pipeline)

        A stage starts the next batch when it has sent this one's stream.
        """
        previous = (self._axis.index - 1) % self._axis.size
        following = (self._axis.index + 1) % self._axis.size
        loss = torch.zeros((), device=x.device)
        for chunk in range(self.chunks):
            # Only the model's first part takes tokens; the others take the stream of the part before.
            inputs = x
            if chunk > 0 or self._axis.index > 0:
                place = self._new_stream(x)
                _, (arrived,) = self._axis.start_messages([], [(place, previous)], "activations")
                inputs = arrived()

            made = self._stage(inputs, y, chunk=chunk)
            if self._is_end(chunk):
                loss = made
            else:
                sent = made.contiguous()
                all_sent, _ = self._axis.start_messages([(sent, following)], [], "activations")
                self._sending.append((all_sent, sent))
        self._wait_for_sent(but=self.chunks)
        return loss


class TiedEmbedding(StepHook):
    """Adds up the two parts of the tied embedding's gradient, on the first and the last stage."""

    def __init__(self, pipe: Pipe, mode: DataParallel, weight: nn.Parameter) -> None:
        self._pipe = pipe
        self._mode = mode
        self._weight = weight

    def add_up(self) -> None:
        self._pipe.add_tied(self._mode.sum_of(self._weight))


def _no_phase(name: str) -> None:
    pass
