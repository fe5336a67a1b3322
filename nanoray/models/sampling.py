"""Sample text from a GPT, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoray.data.tokenizer import Tokenizer
from nanoray.models.gpt import GPT, KVCache


def write_text(model: GPT, tokenizer: Tokenizer, count: int, seed: int) -> str:
    """Return what a model writes after its tokenizer's own prompt: the same for the same weights."""
    device = next(model.parameters()).device
    prompt = torch.tensor([tokenizer.start()], device=device)  # (1, T)
    generator = torch.Generator(device=device).manual_seed(seed)
    # One token is too little work for several threads: waiting for each other takes longer.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokens = generate(model, prompt, count, temperature=0.8, top_k=200, generator=generator)
    finally:
        torch.set_num_threads(threads)
    return tokenizer.decode(tokens[0].tolist()).strip("\n")


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue the prompts idx (B, T) by sampling: (B, T + max_new_tokens).

    Temperature 0 takes the likeliest token. The model reads the last block_size tokens of the
    prompt. Positions are absolute, so sliding the window would make cached keys stale: when the
    cache is full, it is rebuilt from the last max(1, block_size // 2) tokens.
    """
    B, known = idx.shape
    block_size = model.shape.block_size
    tokens = torch.cat([idx, idx.new_empty(B, max_new_tokens)], dim=1)
    cache = [KVCache(block_size) for _ in model.blocks]
    unread = max(0, known - block_size)  # the first token that the cache does not contain
    was_training = model.training
    model.eval()
    try:
        # Compiled blocks run eagerly here: each new length of the cache would trigger a
        # compilation.
        with torch.compiler.set_stance("force_eager"):
            for end in range(known, known + max_new_tokens):
                # A full cache is rebuilt from the second half of a block.
                if cache[0].length + end - unread > block_size:
                    unread = end - max(1, block_size // 2)
                    for layer in cache:
                        layer.length = 0
                # The first pass reads the whole prompt, each further one a single token.
                logits = model(tokens[:, unread:end], kv_cache=cache)  # (B, V)
                tokens[:, end] = _sample(logits.float(), temperature, top_k, generator)
                unread = end
    finally:
        model.train(was_training)
    return tokens


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token (B,) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    V = logits.shape[-1]
    best, tokens = logits.topk(min(top_k or V, V))  # (B, k) each, descending
    # Subtracting the largest keeps the quotient at 0 or below, against overflow at a tiny temperature.
    scaled = (best - best[:, :1]) / max(temperature, 1e-30)
    probs = F.softmax(scaled, dim=-1)  # (B, k)
    choice = torch.multinomial(probs, 1, generator=generator)  # (B, 1)
    return tokens.gather(1, choice)[:, 0]
