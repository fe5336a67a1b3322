"""The GPT of nanoGPT. Nothing here knows about ranks; `parallel/` splits the model by the names of its parts:

    tok_emb, pos_emb                                  tokens and positions become the residual stream  (B, T, C)
    blocks.N   norm1, attn.{qkv, proj}                x + attention of the normed x
               norm2, mlp.{up, down}                  x + a two-layer network of the normed x
    norm, lm_head                                     the stream becomes logits; lm_head.weight is tok_emb.weight

Letters: B sequences, T tokens each, S tokens attended to, C = n_embd, H heads of D = C/H, V = vocab_size.
There are no buffers: the parameters are the whole state of the model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.config import VOCAB_MULTIPLE, Config
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """All sizes that fix the parameters' shapes; a checkpoint fits a model when their ModelShapes are equal."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    vocab_size: int  # tokens that exist; the embedding has padded_vocab rows

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if key != "bias" and value < 1:
                raise ConfigError(f"{key} = {value}, but a model needs at least 1; raise {key}")
        if self.n_embd % self.n_head:
            raise ConfigError(f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}; change one of them")

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> ModelShape:
        """Return the shape of `config` for a tokenizer of `vocab_size` tokens."""
        return cls(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, vocab_size)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def logit_columns(self) -> int:
        """Columns that lm_head computes: padded unless padding is a large share (65 → 128 slows a CPU step by 3 %)."""
        padding = self.padded_vocab - self.vocab_size
        return self.vocab_size if padding > self.vocab_size // 8 else self.padded_vocab

    def to_dict(self) -> dict[str, int | bool]:
        return asdict(self)


class GPT(nn.Module):
    """A decoder-only transformer with pre-norm blocks (Radford et al. 2019), learned positions and tied embeddings."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.tok_emb = nn.Embedding(shape.padded_vocab, shape.n_embd)
        self.pos_emb = nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.lm_head = LMHead(shape)
        self.init_weights()

    def forward(self, idx: Tensor, targets: Tensor | None = None, kv_cache: list[KVCache] | None = None) -> Tensor:
        """Return the mean cross entropy (float32 scalar) given targets (B, T), else the last position's logits (B, V).

        With a kv_cache, one KVCache per block, idx (B, T) continues the cached tokens.
        """
        x = self.embed(idx, kv_cache[0].length if kv_cache else 0)  # (B, T, C)
        for n, block in enumerate(self.blocks):
            x = block(x, kv_cache[n] if kv_cache else None)  # (B, T, C)
        if targets is None:
            return self.lm_head(self.norm(x[:, -1]))[:, : self.shape.vocab_size]  # (B, V)
        logits = self.lm_head(self.norm(x))  # (B, T, logit_columns)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """Return the residual stream (B, T, C) of tokens idx (B, T) at positions start, start + 1, ..."""
        end, limit = start + idx.shape[1], self.shape.block_size
        if end > limit:
            raise ConfigError(f"{end} tokens, but block_size = {limit}; pass fewer, or train with a larger block_size")
        return self.dropout(self.tok_emb(idx) + self.pos_emb.weight[start:end])

    def init_weights(self) -> None:
        """Draw weights as GPT-2 does: N(0, 0.02), over sqrt(2·n_layer) where a layer writes to the residual stream.

        There are 2·n_layer such layers, so the stream's variance does not grow with depth. Call this after `to_empty`
        of a meta model: it ties lm_head to the embedding again.
        """
        self.lm_head.weight = self.tok_emb.weight
        residual_std = 0.02 / math.sqrt(2 * self.shape.n_layer)
        for name, p in self.named_parameters():
            if p.dim() == 1:  # a norm's weight, or a bias
                nn.init.constant_(p, float(name.endswith("weight")))
            else:
                nn.init.normal_(p, std=residual_std if name.endswith(("proj.weight", "down.weight")) else 0.02)


class Block(nn.Module):
    """Attention, which moves information between positions, then an MLP on each position."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attn = Attention(shape, dropout)
        self.norm2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = MLP(shape, dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)  # (B, T, C)
        return x + self.mlp(self.norm2(x))  # (B, T, C)


class Attention(nn.Module):
    """Causal self-attention. qkv's rows are all queries, then all keys, then all values, each head by head."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.head_dim = shape.n_embd // shape.n_head
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, _ = x.shape
        # The number of heads follows from the shape: a rank that holds only some of them runs the same line.
        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        S = k.shape[2]
        # is_causal aligns query 0 with key 0, which is right for T = S. One query sees all keys; else pass a mask.
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T) if 1 < T < S else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout.p * self.training, T == S)  # (B, H, T, D)
        return self.dropout(self.proj(y.transpose(1, 2).flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    """Project up to 4C, apply GELU, project down."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.down = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))  # (B, T, C); gelu is exact, as nanoGPT's, and works on 4C


class LMHead(nn.Linear):
    """The tied output layer. The padding of the vocabulary gets no probability and no gradient."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.n_embd, shape.padded_vocab, bias=False)
        self.vocab_size, self.columns = shape.vocab_size, shape.logit_columns

    def forward(self, x: Tensor) -> Tensor:
        if self.columns == self.vocab_size:
            return F.linear(x, self.weight[: self.vocab_size])  # (..., V)
        # A bias of -inf costs nothing inside the product; slicing the logits would copy gigabytes on a GPU.
        padding = F.pad(x.new_zeros(self.vocab_size), (0, self.columns - self.vocab_size), value=-math.inf)
        return F.linear(x, self.weight, padding)  # (..., padded_vocab)


class KVCache:
    """The keys and values of one block, in tensors of full length that the first append allocates."""

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self.kv: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, T, D); return views of all keys and values, (B, H, S, D). Not for training."""
        B, H, T, D = k.shape
        if self.kv is None:
            self.kv = k.new_empty(2, B, H, self.size, D)
        self.length += T
        keys, values = self.kv[:, :, :, : self.length]  # (B, H, S, D) each
        keys[:, :, -T:], values[:, :, -T:] = k, v
        return keys, values
