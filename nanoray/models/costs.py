"""Parameters, FLOPs and memory of a GPT."""

from __future__ import annotations

from nanoray.errors import ConfigError
from nanoray.models.gpt import ModelShape


def count_parameters(shape: ModelShape) -> int:
    """Return the parameters of GPT(shape) without building it; the tied embedding counts once, with its padding."""
    C, norm = shape.n_embd, shape.n_embd * (1 + shape.bias)
    biases = (3 + 1 + 4 + 1) * C * shape.bias  # qkv, proj, up, down
    return scaling_parameters(shape) + shape.block_size * C + shape.n_layer * (biases + 2 * norm) + norm


def scaling_parameters(shape: ModelShape) -> int:
    """Return nanochat's S, which sets the token budget: the blocks' matrices and lm_head (here the embedding, too)."""
    block = (3 + 1 + 4 + 4) * shape.n_embd**2  # qkv, proj, up, down
    return shape.n_layer * block + shape.padded_vocab * shape.n_embd


def flops_per_token(shape: ModelShape) -> int:
    """Return the FLOPs of forward and backward for one token of a full context (PaLM, Chowdhery et al. 2022, app. B).

    6 per parameter except position embeddings, and 12·L·H·Q·T for attention with H heads of size Q, counted as if it
    were not causal. nanoGPT uses the same formula, so MFU values are comparable.
    """
    L, C, T = shape.n_layer, shape.n_embd, shape.block_size
    return 6 * (count_parameters(shape) - T * C) + 12 * L * C * T


def memory_estimate(shape: ModelShape, micro_batch_size: int, precision: str) -> dict[str, int]:
    """Return the bytes that one rank of plain data parallelism holds at the peak of a step, eager, without dropout.

    - parameters, gradients, optimizer (AdamW's moments): float32; autocast adds 2-byte copies of the matrices
    - activations  kept for backward, per token: each block 2·C float32 (inputs of its norms), 14·C in the compute
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
