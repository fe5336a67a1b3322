"""GPT as nanoGPT trains it, its sampler, and what it costs: parameters, FLOPs, bytes.

Nothing here knows about ranks. `parallel/` takes the model apart by its names:

    tok_emb, pos_emb                                  tokens and positions become the residual stream  (B, T, C)
    blocks.N   norm1, attn.{qkv, proj}                x + attention of the normed x
               norm2, mlp.{up, down}                  x + a two-layer network of the normed x
    norm, lm_head                                     the stream becomes logits; lm_head.weight is tok_emb.weight

Letters: B sequences, T tokens each, S tokens attended to, C = n_embd, H heads of D = C/H, V = vocab_size.
There are no buffers: whoever has the parameters has the model.
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
    """Everything that fixes the parameters' shapes; two models fit each other when their shapes are equal."""

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
        """The shape that `config` asks for, over a tokenizer of `vocab_size` tokens."""
        return cls(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias, vocab_size)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def logit_columns(self) -> int:
        """Columns that lm_head computes: no padding where that is a large share (65 → 128 slows a CPU step by 3 %)."""
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
        """The mean cross entropy (float32 scalar) given targets (B, T), else the last position's logits (B, V).

        With a kv_cache, one KVCache per block, idx (B, T) continues the tokens that the cache has seen.
        """
        x = self.embed(idx, kv_cache[0].length if kv_cache else 0)  # (B, T, C)
        for n, block in enumerate(self.blocks):
            x = block(x, kv_cache[n] if kv_cache else None)  # (B, T, C)
        if targets is None:
            return self.lm_head(self.norm(x[:, -1]))[:, : self.shape.vocab_size]  # (B, V)
        logits = self.lm_head(self.norm(x))  # (B, T, logit_columns)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def embed(self, idx: Tensor, start: int = 0) -> Tensor:
        """The residual stream (B, T, C) of tokens idx (B, T) that stand at positions start, start + 1, ..."""
        end, limit = start + idx.shape[1], self.shape.block_size
        if end > limit:
            raise ConfigError(f"{end} tokens, but block_size = {limit}; pass fewer, or train with a larger block_size")
        return self.dropout(self.tok_emb(idx) + self.pos_emb.weight[start:end])

    def init_weights(self) -> None:
        """Draw weights as GPT-2: N(0, 0.02), and over sqrt(2·n_layer) in the 2·n_layer writes to the residual stream.

        So the stream's variance does not grow with depth. After `to_empty` of a meta model, call it: it ties anew.
        """
        self.lm_head.weight = self.tok_emb.weight
        residual_std = 0.02 / math.sqrt(2 * self.shape.n_layer)
        for name, p in self.named_parameters():
            if p.dim() == 1:  # a norm's weight, or a bias
                nn.init.constant_(p, float(name.endswith("weight")))
            else:
                nn.init.normal_(p, std=residual_std if name.endswith(("proj.weight", "down.weight")) else 0.02)


class Block(nn.Module):
    """Two residual writes: attention moves information between positions, the MLP works on each alone."""

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
        # Heads are counted, not known: a rank that holds only some of them runs the same line.
        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        S = k.shape[2]
        # is_causal aligns query 0 with key 0: right for T = S. A single query sees everything; between, spell it out.
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T) if 1 < T < S else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout.p * self.training, T == S)  # (B, H, T, D)
        return self.dropout(self.proj(y.transpose(1, 2).flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    """Widen fourfold, bend, come back."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.down = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))  # (B, T, C); gelu is exact, as nanoGPT's, and works on 4C


class LMHead(nn.Linear):
    """The tied output layer. Its softmax gives the padding of the vocabulary no probability and no gradient."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.n_embd, shape.padded_vocab, bias=False)
        self.vocab_size, self.columns = shape.vocab_size, shape.logit_columns

    def forward(self, x: Tensor) -> Tensor:
        if self.columns == self.vocab_size:
            return F.linear(x, self.weight[: self.vocab_size])  # (..., V)
        # A bias of -inf costs nothing inside the product; cutting the logits would copy them, gigabytes on a GPU.
        padding = F.pad(x.new_zeros(self.vocab_size), (0, self.columns - self.vocab_size), value=-math.inf)
        return F.linear(x, self.weight, padding)  # (..., padded_vocab)


class KVCache:
    """The keys and values of one block, in tensors of full length that the first append makes."""

    def __init__(self, size: int) -> None:
        self.size, self.length = size, 0
        self.kv: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, T, D) behind what is there; return views of all of it. Not for training."""
        B, H, T, D = k.shape
        if self.kv is None:
            self.kv = k.new_empty(2, B, H, self.size, D)
        self.length += T
        keys, values = self.kv[:, :, :, : self.length]  # (B, H, S, D) each
        keys[:, :, -T:], values[:, :, -T:] = k, v
        return keys, values


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue the prompts idx (B, T) by sampling: (B, T + max_new_tokens). Temperature 0 takes the likeliest token.

    The model reads the last block_size tokens of the prompt. Positions are absolute, so a window that slides makes its
    keys stale: whenever the cache is full, it is made anew from the last max(1, block_size // 2) tokens.
    """
    _refuse_bad_request(model.shape, idx, max_new_tokens, temperature, top_k)
    (B, known), block_size, was_training = idx.shape, model.shape.block_size, model.training
    tokens = torch.cat([idx, idx.new_empty(B, max_new_tokens)], dim=1)
    cache = [KVCache(block_size) for _ in model.blocks]
    unread = max(0, known - block_size)  # the first token that the cache has not seen
    model.eval()
    try:
        # Compiled blocks run eagerly here: each new length of the cache would compile them again.
        with torch.compiler.set_stance("force_eager"):
            for end in range(known, known + max_new_tokens):
                if cache[0].length + end - unread > block_size:
                    unread = end - max(1, block_size // 2)
                    for layer in cache:
                        layer.length = 0
                logits = model(tokens[:, unread:end], kv_cache=cache)  # (B, V)
                tokens[:, end] = _sample(logits.float(), temperature, top_k, generator)
                unread = end
    finally:
        model.train(was_training)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token (B,) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    best, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # (B, k), falling
    probs = F.softmax((best - best[:, :1]) / max(temperature, 1e-30), dim=-1)  # never above 0: no overflow
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def _refuse_bad_request(shape: ModelShape, idx: Tensor, count: int, temperature: float, top_k: int | None) -> None:
    if idx.dim() != 2 or idx.numel() == 0:
        raise ConfigError(f"a prompt of shape {tuple(idx.shape)}; pass (sequences, tokens), at least one token each")
    low, high, V = int(idx.min()), int(idx.max()), shape.vocab_size
    if low < 0 or high >= V:
        raise ConfigError(f"prompt tokens {low}..{high} are outside 0..{V - 1}; encode it with this model's tokenizer")
    if count < 0:
        raise ConfigError(f"max_new_tokens = {count} is negative; use 0 or more")
    if not temperature >= 0:  # so that nan is refused too
        raise ConfigError(f"temperature = {temperature} is not 0 or more; use 0 (the likeliest token) or about 0.8")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k = {top_k} leaves no token to choose; use 1 or more, or None to choose among all")


def count_parameters(shape: ModelShape) -> int:
    """Parameters of GPT(shape) without making it; the tied embedding counts once, with its padding."""
    C, norm = shape.n_embd, shape.n_embd * (1 + shape.bias)
    biases = (3 + 1 + 4 + 1) * C * shape.bias  # qkv, proj, up, down
    return scaling_parameters(shape) + shape.block_size * C + shape.n_layer * (biases + 2 * norm) + norm


def scaling_parameters(shape: ModelShape) -> int:
    """nanochat's S, to which tokens are proportional: the blocks' matrices and lm_head (here also the embedding)."""
    block = (3 + 1 + 4 + 4) * shape.n_embd**2  # qkv, proj, up, down
    return shape.n_layer * block + shape.padded_vocab * shape.n_embd


def flops_per_token(shape: ModelShape) -> int:
    """FLOPs of forward and backward for one token of a full context (PaLM, Chowdhery et al. 2022, appendix B).

    6 per parameter but the position embeddings, and 12·L·H·Q·T for attention with H heads of size Q, counted as if it
    were not causal. It is nanoGPT's formula, so MFU compares.
    """
    L, C, T = shape.n_layer, shape.n_embd, shape.block_size
    return 6 * (count_parameters(shape) - T * C) + 12 * L * C * T


def memory_estimate(shape: ModelShape, micro_batch_size: int, precision: str) -> dict[str, int]:
    """Bytes that one rank of plain data parallelism holds at the peak of a step, eager and without dropout.

    - parameters, gradients, optimizer (AdamW's moments): float32; autocast adds 2-byte copies of the matrices
    - activations  what backward needs of a token: each block 2·C float32 (inputs of its norms), 14·C in the compute
                   dtype (qkv's input, 3 q k v, proj's, up's, 4 gelu's, 4 down's) and H float32 (attention's
                   log-sum-exp); the last norm C float32, lm_head C; 2 float32 per norm; 8 for idx, 8 for its target
    - logits       two float32 tensors (B, T, columns): logits, log-softmax; under autocast a 2-byte one before them
    """
    if precision not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"no memory estimate for precision = {precision}; use fp32, bf16 or fp16")
    half, size = (False, 4) if precision == "fp32" else (True, 2)
    C, params, tokens = shape.n_embd, count_parameters(shape), micro_batch_size * shape.block_size
    block = (2 * 4 + 14 * size) * C + 4 * shape.n_head + 2 * 8
    per_token = shape.n_layer * block + (4 + size) * C + 8 + 8 + 8
    estimate = {
        "parameters": 4 * params + 2 * half * scaling_parameters(shape),
        "gradients": 4 * params,
        "optimizer": 8 * params,
        "activations": tokens * per_token,
        "logits": tokens * shape.logit_columns * (8 + 2 * half),
    }
    return estimate | {"total": sum(estimate.values())}
