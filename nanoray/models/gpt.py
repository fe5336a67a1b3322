"""The GPT of nanoGPT. Nothing here depends on ranks: `parallel/` splits the model by its names.

    tok_emb, pos_emb                       tokens and positions become the residual stream (B, T, C);
                                           with rotary positions there is no pos_emb
    blocks.N   norm1, attn.{qkv, proj}     x + attention of the normed x
               norm2, mlp.{up, down}       x + a two-layer network, or a mixture of experts, of the
                                           normed x
    norm, lm_head                          the stream becomes logits; lm_head.weight is tok_emb.weight

Letters: B sequences, T tokens each, S tokens attended to, C = n_embd, H heads of D = C/H, V =
vocab_size. There are no buffers: the parameters are the whole state of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.config import VOCAB_MULTIPLE, Config
from nanoray.errors import ConfigError
from nanoray.models.activation_checkpointing import run_block
from nanoray.models.dropout import derive_seed, dropout_layer, seed_generators
from nanoray.models.kernels import (
    Kernels,
    chunked_cross_entropy,
    fused_attention,
    padded_logits,
    plain_attention,
    rotate,
)
from nanoray.models.moe import MoE, RouterTraining, Routing, Stacked

# The forms of GELU, by their names in the configuration: torch's word for each
GELU_FORMS = {"exact": "none", "tanh": "tanh"}


@dataclass(frozen=True)
class ModelShape:
    """What a model is: all sizes that fix its parameters' shapes, and the form of its GELU.

    A checkpoint fits a model of an equal one.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    vocab_size: int  # tokens that exist; the embedding has padded_vocab rows
    experts: int = 0  # in place of each MLP; 0: none, and the sizes of experts have no effect
    experts_per_token: int = 0
    expert_hidden: int = 0  # hidden units of one expert
    shared_experts: int = 0
    # Queries and keys are rotated by their positions, in place of a position embedding
    rotary: bool = False
    # exact, as nanoGPT's, or tanh, the approximation that GPT-2 was trained with. No shape depends
    # on it, but with the other form the same weights are another model
    gelu: str = "exact"

    def __post_init__(self) -> None:
        head_dim = self.n_embd // self.n_head
        if self.rotary and head_dim % 2:
            raise ConfigError(
                "positions = rotary turns pairs of numbers, but a head has n_embd/n_head = "
                f"{self.n_embd}/{self.n_head} = {head_dim}; use another n_head, or positions "
                "learned"
            )

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> ModelShape:
        """Return the shape of `config` for a tokenizer of `vocab_size` tokens."""
        dense = cls(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            block_size=config.block_size,
            bias=config.bias,
            vocab_size=vocab_size,
            rotary=config.positions == "rotary",
            gelu=config.gelu,
        )
        if not config.experts:
            return dense
        return replace(
            dense,
            experts=config.experts,
            experts_per_token=config.experts_per_token,
            expert_hidden=config.expert_hidden or 4 * config.n_embd,
            shared_experts=config.shared_experts,
        )

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: vocab_size, rounded up for faster matrix products."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def logit_columns(self) -> int:
        """Columns that lm_head computes: padded, unless the padding is a large share of them.

        (65 padded to 128 slows a step on a CPU.)
        """
        padding = self.padded_vocab - self.vocab_size
        if padding > self.vocab_size // 8:
            return self.vocab_size
        return self.padded_vocab

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as plain data."""
        return asdict(self)


class GPT(nn.Module):
    """A decoder-only transformer with pre-norm blocks (Radford et al. 2019) and tied embeddings."""

    def __init__(
        self,
        shape: ModelShape,
        dropout: float = 0.0,
        activation_checkpointing: str = "none",
        routers: RouterTraining = RouterTraining(),  # noqa: B008
        kernels: Kernels = Kernels(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.shape = shape
        self.routing = Routing(routers, shape.n_layer) if shape.experts else None

        self.tok_emb = nn.Embedding(shape.padded_vocab, shape.n_embd)
        self.pos_emb: Any = nn.Identity()  # rotary positions act in the attention
        if not shape.rotary:
            self.pos_emb = Positions(shape.block_size, shape.n_embd)
        self.dropout = dropout_layer(dropout)

        self.blocks = nn.ModuleList()
        for _ in range(shape.n_layer):
            if activation_checkpointing == "none":
                block = Block(shape, dropout, kernels)
            else:
                block = CheckpointedBlock(shape, dropout, kernels, activation_checkpointing)
            self.blocks.append(block)

        self.norm = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.lm_head = LMHead(shape, kernels.loss_chunk)
        self.init_weights()

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: list[KVCache] | None = None
    ) -> Tensor:
        """Return the loss given targets (B, T), else the last position's logits (B, V).

        The loss is the mean cross entropy, a float32 scalar. With a kv_cache, one KVCache per
        block, idx (B, T) continues the cached tokens.
        """
        # The masks of a layer follow from the caller's seed, say of this micro batch.
        drops = self.training and self.dropout.p > 0
        seed = torch.initial_seed() if drops else 0

        # Tokens become the residual stream.
        start = kv_cache[0].length if kv_cache else 0
        x = self.embed(idx, start)  # (B, T, C)

        # Each block adds to the stream.
        routed: dict[int, Tensor] = {}  # layer -> its router's statistics
        for layer, block in enumerate(self.blocks):
            if drops:  # outside of the block, which may be compiled
                seed_generators(derive_seed(seed, layer), x.device)
            x = block(x, kv_cache[layer] if kv_cache else None)  # (B, T, C)
            if self.routing:
                x, routed[layer] = x

        # To sample, only the last position is needed.
        if targets is None:
            logits = self.lm_head(self.norm(x[:, -1]))  # (B, logit_columns)
            return logits[:, : self.shape.vocab_size]  # (B, V)

        loss = self.lm_head.loss(self.norm(x), targets)  # ()
        if self.routing and self.training:
            loss = self.routing.added_to(loss, routed)
        return loss

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Return the residual stream (B, T, C) of tokens idx (B, T); the first is at `start`."""
        end = start + idx.shape[1]
        limit = self.shape.block_size
        if end > limit:
            raise ConfigError(
                f"{end} tokens, but block_size = {limit}; pass fewer, or train with a larger "
                "block_size"
            )
        x = self.tok_emb(idx)  # (B, T, C)
        if not self.shape.rotary:
            x = x + self.pos_emb(start, end)  # (T, C) is added to each sequence
        return self.dropout(x)

    def init_weights(self) -> None:
        """Draw weights as GPT-2 does: N(0, 0.02), smaller where a layer writes to the stream.

        There are 2·n_layer such layers, and theirs is 0.02 / sqrt(2·n_layer), so the stream's
        variance does not grow with depth. Call this after `to_empty` of a meta model: it ties
        lm_head to the embedding again.
        """
        # Tied: one parameter, with the sum of both gradients.
        self.lm_head.weight = self.tok_emb.weight
        residual_std = 0.02 / math.sqrt(2 * self.shape.n_layer)
        for name, p in self.named_parameters():
            if p.dim() == 1:  # a norm's weight is 1, a bias is 0
                nn.init.constant_(p, float(name.endswith("weight")))
            elif name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(p, std=residual_std)
            else:
                nn.init.normal_(p, std=0.02)

    def views(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the parameters that are cut in another shape than their own.

        These are qkv, where queries, keys and values are cut apart, and the experts' biases, which
        lie one behind the other.
        """
        C = self.shape.n_embd
        E = self.shape.experts
        shapes: dict[str, tuple[int, ...]] = {}
        for name, p in self.named_parameters():
            if ".qkv." in name:
                shapes[name] = (3, C, C) if p.dim() == 2 else (3, C)
        for name, module in self.named_modules():
            if isinstance(module, Stacked) and module.bias is not None:
                shapes[f"{name}.bias"] = (E, module.bias.numel() // E)
        return shapes


class Positions(nn.Embedding):
    """A learned vector for each position."""

    def forward(self, start: int, end: int) -> Tensor:  # type: ignore[override]
        """Return the vectors (end - start, C) of positions start to end - 1."""
        return self.weight[start:end]


class Block(nn.Module):
    """Attention, which mixes positions, then an MLP, or experts, on each position."""

    def __init__(
        self,
        shape: ModelShape,
        dropout: float,
        kernels: Kernels = Kernels(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attn = Attention(shape, dropout, kernels.attention)
        self.norm2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = experts_of(shape, dropout) if shape.experts else MLP(shape, dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Any:
        """Return the stream (B, T, C) after this block; with experts, also routing statistics."""
        # Pre-norm: the stream itself is never normalised between blocks.
        x = x + self.attn(self.norm1(x), cache)  # (B, T, C)
        y = self.mlp(self.norm2(x))  # (B, T, C)
        if isinstance(y, tuple):
            y, statistics = y
            return x + y, statistics
        return x + y


class CheckpointedBlock(Block):
    """A block of which backward computes a part again.

    Inside of the block, so that a compiled block contains it, and fsdp gathers the weights once for
    both computations.
    """

    def __init__(
        self,
        shape: ModelShape,
        dropout: float,
        kernels: Kernels,
        activation_checkpointing: str,
    ) -> None:
        super().__init__(shape, dropout, kernels)
        self.activation_checkpointing = activation_checkpointing
        self.drops = dropout > 0

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Any:
        if cache is not None:
            return self._layers(x, cache)
        drops = self.drops and self.training
        return run_block(self._layers, x, self.activation_checkpointing, drops)

    def _layers(self, x: Tensor, cache: KVCache | None = None) -> Any:
        return super().forward(x, cache)


class Attention(nn.Module):
    """Causal self-attention. qkv's rows are queries, then keys, then values, head by head."""

    def __init__(self, shape: ModelShape, dropout: float, kernel: str = "flash") -> None:
        super().__init__()
        self.head_dim = shape.n_embd // shape.n_head
        self.rotary = shape.rotary
        self.kernel = kernel
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        return self.dropout(self.proj(self.heads(x, cache)))  # (B, T, C)

    def heads(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the heads' results for x (B, T, C), one beside the other: (B, T, C)."""
        qkv = self.qkv(x)  # (B, T, 3C)
        B, T, _ = qkv.shape

        # The number of heads follows from the shape: a rank that holds only some of them runs the
        # same line.
        q, k, v = (
            part.view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
            for part in qkv.chunk(3, -1)
        )
        if self.rotary:
            start = cache.length if cache is not None else 0
            q = rotate(q, start)
            k = rotate(k, start)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)

        dropout_p = self.dropout.p if self.training else 0.0
        if self.kernel == "plain":
            y = plain_attention(q, k, v, dropout_p)  # (B, H, T, D)
        else:
            cudnn = self.kernel == "cudnn" and cache is None
            y = fused_attention(q, k, v, dropout_p, cudnn=cudnn)  # (B, H, T, D)
        return y.transpose(1, 2).flatten(2)  # (B, T, C)


class MLP(nn.Module):
    """Project up to 4C, or to `hidden` units, apply GELU, project down."""

    def __init__(self, shape: ModelShape, dropout: float, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or 4 * shape.n_embd
        self.up = nn.Linear(shape.n_embd, hidden, bias=shape.bias)
        self.down = nn.Linear(hidden, shape.n_embd, bias=shape.bias)
        self.gelu = GELU_FORMS[shape.gelu]
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate=self.gelu)  # (B, T, C) -> (B, T, 4C)
        return self.dropout(self.down(hidden))  # (B, T, 4C) -> (B, T, C)


def experts_of(shape: ModelShape, dropout: float) -> MoE:
    """Return a block's experts. The shared ones are one MLP with the hidden units of them all."""
    shared = None
    if shape.shared_experts:
        shared = MLP(shape, 0.0, shape.shared_experts * shape.expert_hidden)
    return MoE(
        width=shape.n_embd,
        experts=shape.experts,
        per_token=shape.experts_per_token,
        hidden=shape.expert_hidden,
        bias=shape.bias,
        dropout=dropout,
        shared=shared,
        gelu=GELU_FORMS[shape.gelu],
    )


class LMHead(nn.Linear):
    """The tied output layer. The padding of the vocabulary gets no probability and no gradient."""

    def __init__(self, shape: ModelShape, loss_chunk: int = 0) -> None:
        super().__init__(shape.n_embd, shape.padded_vocab, bias=False)
        self.vocab_size = shape.vocab_size
        self.columns = shape.logit_columns
        self.loss_chunk = loss_chunk
        # kernels.cross_entropy, where parallel/compile.py has compiled it
        self.compiled_loss: Callable[..., Tensor] | None = None

    def columns_on(self, device: torch.device) -> int:
        """Return the columns that are computed: on a GPU all of them, padding included.

        Its tensor cores take rows of 16 bytes or more: 65 numbers of 16 bits would be multiplied by
        slower units. A CPU has no such limit.
        """
        if device.type == "cuda":
            return self.weight.shape[0]
        return self.columns

    def forward(self, x: Tensor) -> Tensor:
        return padded_logits(x, self.weight, self.vocab_size, self.columns_on(x.device))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy (float32 scalar) of x (B, T, C), given targets (B, T)."""
        targets = targets.flatten()  # (B·T,)
        flat = x.flatten(0, 1)  # (B·T, C)
        columns = self.columns_on(x.device)
        # In chunks, the logits of all tokens never exist at once.
        if self.loss_chunk:
            return chunked_cross_entropy(
                flat, self.weight, targets, self.vocab_size, self.loss_chunk, columns
            )
        if self.compiled_loss is not None:
            return self.compiled_loss(flat, self.weight, targets, self.vocab_size, columns)
        # In float32, because 16-bit probabilities would round away small differences.
        logits = self(x)  # (B, T, columns)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets)


class KVCache:
    """The keys and values of one block, in tensors of full length; the first append allocates."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.length = 0
        self.kv: Tensor | None = None  # (2, B, H, size, D)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, T, D); return views of all keys and values, (B, H, S, D) each.

        Not for training: the views share memory with later appends.
        """
        B, H, T, D = k.shape
        # Allocated at the first append, which has the batch size, dtype and device.
        if self.kv is None:
            self.kv = k.new_empty(2, B, H, self.size, D)
        self.length += T
        keys, values = self.kv[:, :, :, : self.length]  # (B, H, S, D) each
        keys[:, :, -T:] = k
        values[:, :, -T:] = v
        return keys, values
