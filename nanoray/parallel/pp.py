"""Pipeline parallelism by hand: every rank of an axis has some layers, and micro batches pass from
rank to rank.

With pp = 2 and six layers; x is the residual stream (B, T, C) of one micro batch, dx its gradient:

    1f1b, gpipe     rank 0   tok_emb pos_emb  0 1 2 ── x ──►                    rank 1   3 4 5  norm lm_head ─► loss
                                                    ◄── dx ──

    interleaved     rank 0   tok_emb pos_emb  0 ─ x ►   2 ─ x ►   4 ─ x ►        three chunks on each rank: the stream
    3 chunks        rank 1                    1 ─ x ►   3 ─ x ►   5  norm lm_head    passes every rank three times

`schedules.py` says in which order a rank computes its turns, and in which tick what each of them
makes is sent. All ranks read the same timetable, so both sides of a message know of it: one batch
of messages per tick.

    F   receive x from the part before (the first part embeds tokens), compute, keep the graph, send x on
    B   receive dx from the part after (the last part has the loss), backward through the kept graph, send dx back
    W   in zero_bubble: the gradients of weights, which B then leaves out (zero_bubble.py)

What is not of one stage alone:

    loss        the last stage has it, and applies the mean's factor and fp16's scale; a sum of 4 bytes tells all of it
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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nanoray.config.conflicts import require_stages
from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.pieces import Shard, whole_pieces
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.gpt import GPT
from nanoray.parallel.schedules import Turn, last_half, messages, straight, timetable
from nanoray.parallel.zero_bubble import WeightGradients

Compute = Callable[..., Tensor]  # (module, x, targets) -> the loss, or a residual stream
Phase = Callable[[str], None]  # is told what this rank does now
TIED = "tok_emb.weight"


class Stage(GPT):
    """The layers of one rank, in chunks. They keep the names that they have in the whole model."""

    parts: list[range]  # of this rank's chunks: their layers
    first: bool  # whether chunk 0 embeds tokens
    last: bool  # whether the last chunk ends in the loss
    # The routers' losses of the last forward that did not end in the loss
    aside: Tensor | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None, chunk: int = 0) -> Tensor:  # type: ignore[override]
        """Run one chunk: x is the residual stream (B, T, C), or tokens (B, T) for the first part of
        the model.

        Returns the stream, or at the end of the model the mean cross entropy, given targets (B, T).
        """
        drops = self.training and self.dropout.p > 0
        seed, told = torch.initial_seed() if drops else 0, dict[int, Tensor]()
        if self.first and chunk == 0:
            x = self.embed(x)  # (B, T, C)
        for n in self.parts[chunk]:
            if drops:
                seed_generators(derive_seed(seed, n), x.device)
            x = self.blocks[n](x, None)
            if self.routing:
                x, told[n] = x
        routing = self.routing if self.training else None
        if self.last and chunk == len(self.parts) - 1:
            assert targets is not None
            loss = self.lm_head.loss(self.norm(x), targets)
            return routing.added_to(loss, told) if routing else loss
        self.aside = routing.losses(told) if routing else None
        return x

    @property
    def tied(self) -> nn.Parameter | None:
        """The weight that the first and the last stage both have."""
        return next(self.tok_emb.parameters(), None)

    def chunk_params(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each chunk, whose gradients are complete at the same time, in
        the model's order.
        """
        chunks = [[p for n in part for p in self.blocks[n].parameters()] for part in self.parts]
        if self.first:
            chunks[0] = [*self.tok_emb.parameters(), *self.pos_emb.parameters(), *chunks[0]]
        if self.last:
            chunks[-1] = [*self.tok_emb.parameters(), *chunks[-1], *self.norm.parameters()]
        return chunks


def split(model: nn.Module, stage: int, pp: int, chunks: int = 1) -> Stage:
    """Keep one stage's layers of a whole GPT, in place, and return it. Nothing communicates; meta
    tensors will do.

    All ranks must hold equal weights. Raises ConfigError when the model cannot be split.
    """
    if not isinstance(model, GPT):
        raise ConfigError(
            f"pp = {pp} splits a gpt, but the model is a {type(model).__name__}; drop pp"
        )
    require_stages(pp, chunks, model.shape.n_layer)
    size = model.shape.n_layer // (pp * chunks)
    starts = [(chunk * pp + stage) * size for chunk in range(chunks)]
    pieces, elsewhere = whole_pieces(model), nn.Identity()
    own = {n for start in starts for n in range(start, start + size)}
    for n in range(model.shape.n_layer):
        if n not in own:
            model.blocks[n] = elsewhere
    first, last = stage == 0, stage == pp - 1
    gone = [*([] if first else ["pos_emb"]), *([] if last else ["norm"])]
    for name in gone + ([] if first or last else ["tok_emb", "lm_head"]):
        setattr(model, name, elsewhere)
    model.__class__ = Stage
    model.parts = [range(start, start + size) for start in starts]  # type: ignore[assignment]
    model.first, model.last = first, last  # type: ignore[assignment]
    if model.routing:
        model.routing.stages = pp
    model.pieces = {name: pieces[name] for name, _ in model.named_parameters()}  # type: ignore[assignment]
    assert isinstance(model, Stage)
    return model


def with_tie(shards: Sequence[Shard], stage: int) -> list[Shard]:
    """Return a stage's shards with both holders of the tied embedding; the first stage owns it."""
    return [
        replace(s, holders=2 * s.holders, owner=s.owner and stage == 0)
        if s.piece.name == TIED
        else s
        for s in shards
    ]


class Straight:
    """The whole model on every rank: each forward is followed by its backward."""

    chunks, last_half, late = 1, "B", None

    def __init__(self, accum: int) -> None:
        self.turns = straight(accum)
        self._made: Tensor | None = None

    def receive(self, turn: Turn, phase: Phase, x: Tensor | None = None) -> None:
        """Wait for nothing: all that a turn needs is here."""

    def forward(
        self, turn: Turn, model: nn.Module, compute: Compute, x: Tensor, y: Tensor
    ) -> Tensor | None:
        """Return the mean loss of a micro batch, and keep its graph."""
        self._made = compute(model, x, y)
        return self._made.detach()

    def backward(self, turn: Turn, scaled: Callable[[Tensor], Tensor]) -> None:
        """Run the backward of the loss, after `scaled` was applied to it."""
        loss, self._made = self._made, None
        assert loss is not None
        scaled(loss).backward()

    def finish(self, loss: Tensor, phase: Phase) -> Tensor:
        """Return the mean loss of the step, given this rank's."""
        return loss


class Pipe:
    """One rank's share of a pipeline: computes a stage's turns, and sends and receives by the
    timetable.
    """

    def __init__(self, stage: Stage, axis: Axis, kind: str, accum: int, parts: int = 1) -> None:
        """Lay out the turns of a step of `accum` micro batches; `parts`: ranks that share the
        stream's positions.
        """
        self._stage, self._axis, self.chunks, self._parts = stage, axis, len(stage.parts), parts
        self.last_half = last_half(kind)
        self._weights = WeightGradients(stage) if self.last_half == "W" else None
        self.late = self._weights.params if self._weights else None  # whose gradients come with W
        table = timetable(kind, axis.size, accum, self.chunks)
        own = [(tick, turn) for tick, row in enumerate(table) if (turn := row[axis.index])]
        self.turns = [turn for _, turn in own]
        self._tick_of = {turn: tick for tick, turn in own}
        self._messages = messages(table, axis.size, self.chunks)
        self._tick = 0  # the first one whose messages have not been started
        self._like = torch.empty(0)  # tokens (B, T) of this step
        self._arriving: dict[Turn, Callable[[], Tensor]] = {}
        self._received: Tensor | None = None  # for the next turn
        # What an F read, what it made, and its routers' losses, until its B.
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor, Tensor | None]] = {}
        self._sending: list[tuple[Callable[[], None], Tensor]] = []

    def receive(self, turn: Turn, phase: Phase, x: Tensor | None = None) -> None:
        """Wait for what a turn needs from another rank. The first turn of a step comes with tokens
        x (B, T).
        """
        self._like = self._like if x is None else x
        while self._tick < self._tick_of[turn]:
            self._exchange()
        arriving = self._arriving.pop(turn, None)
        if arriving:
            phase("idle")
        self._received = arriving() if arriving else None

    def _exchange(self, made: Tensor | None = None) -> None:
        """Start the messages of the next tick, in which this rank may have `made` something."""
        stage, row = self._axis.index, self._messages[self._tick]
        self._tick += 1
        sent = [(made, m.target) for m in row if m.source == stage and made is not None]
        got = [(m, self._stream_of(self._like)) for m in row if m.target == stage]
        if not sent and not got:
            return
        all_sent, arrivals = self._axis.start_messages(
            sent, [(into, m.source) for m, into in got], "activations"
        )
        self._arriving |= {m.turn: arrived for (m, _), arrived in zip(got, arrivals, strict=True)}
        self._sending += [(all_sent, tensor) for tensor, _ in sent]
        # So the memory of what was sent is free again. Receivers reach an earlier tick without this
        # rank's help.
        self._wait_for_sent(but=2 * self._axis.size * self.chunks)

    def _stream_of(self, x: Tensor) -> Tensor:
        B, T = x.shape
        return torch.empty(B, T // self._parts, self._stage.shape.n_embd, device=x.device)

    def forward(
        self, turn: Turn, model: nn.Module, compute: Compute, x: Tensor, y: Tensor
    ) -> Tensor | None:
        """Run a chunk's forward and send its stream on; return the mean loss at the end of the
        model.
        """
        stream, self._received = self._received, None
        if stream is not None:
            stream.requires_grad_()
        made = compute(partial(model, chunk=turn.chunk), x if stream is None else stream, y)
        self._kept[turn.chunk, turn.micro] = stream, made, self._stage.aside
        self._stage.aside = None
        self._exchange(None if self._is_end(turn.chunk) else made.detach().contiguous())
        return made.detach() if self._is_end(turn.chunk) else None

    def backward(self, turn: Turn, scaled: Callable[[Tensor], Tensor]) -> None:
        """Run a chunk's backward and send the stream's gradient back. The scale enters at the end
        of the model.
        """
        if turn.op == "W":
            assert self._weights
            self._weights.compute(turn.micro)
            self._exchange()
            return
        stream, made, aside = self._kept.pop((turn.chunk, turn.micro))
        gradient, self._received = self._received, None
        if gradient is None:
            scaled(made).backward()
        elif aside is None:
            made.backward(gradient)
        else:
            torch.autograd.backward([made, scaled(aside)], [gradient, None])
        if self._weights:
            self._weights.keep(turn.micro)
        self._exchange(None if stream is None else stream.grad)

    def _is_end(self, chunk: int) -> bool:
        return self._stage.last and chunk == self.chunks - 1

    def finish(self, loss: Tensor, phase: Phase) -> Tensor:
        """Wait until all is sent; return the mean loss on every stage. (all ranks of the pipeline)"""
        phase("idle")
        assert not self._arriving
        assert not self._kept
        self._tick = 0
        self._wait_for_sent()
        return self._axis.sum(loss, "loss")

    def _wait_for_sent(self, but: int = 0) -> None:
        while len(self._sending) > but:
            all_sent, _ = self._sending.pop(0)
            all_sent()

    def add_tied(self, gradient: Tensor) -> None:
        """Add the other stage's part to this one's of the tied embedding's gradient. (first and
        last stage)
        """
        other = self._axis.size - 1 - self._axis.index
        theirs = torch.empty_like(gradient)
        all_sent, (arrived,) = self._axis.start_messages(
            [(gradient, other)], [(theirs, other)], "gradients"
        )
        arrived()
        all_sent()
        gradient += theirs

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch of any shape on the last stage, elsewhere 0. (all ranks
        of the pipeline)

        A stage goes on with the next batch when it has sent this one's stream.
        """
        pp, stage, chunks = self._axis.size, self._axis.index, self.chunks
        loss = torch.zeros((), device=x.device)
        for chunk in range(chunks):
            stream = x
            if chunk or stage:
                into = self._stream_of(x)
                _, (arrived,) = self._axis.start_messages(
                    [], [(into, (stage - 1) % pp)], "activations"
                )
                stream = arrived()
            made = self._stage(stream, y, chunk=chunk)
            if self._is_end(chunk):
                loss = made
            else:
                sent = made.contiguous()
                all_sent, _ = self._axis.start_messages(
                    [(sent, (stage + 1) % pp)], [], "activations"
                )
                self._sending.append((all_sent, sent))
        self._wait_for_sent(but=chunks)
        return loss
