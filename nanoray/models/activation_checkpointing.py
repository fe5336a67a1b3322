"""Activation checkpointing: keep less of the forward pass, and compute the rest again in backward.

    none        keep all that backward needs
    selective   keep what matrix products and attention return; compute norms, GELU and sums again
    block       keep each block's input; compute the whole block again, one block at a time

The second computation repeats the first one, dropout's masks included: losses and gradients have
the same bits. Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost;
Korthikanti et al. 2022 for selective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nanoray.machine.compat import CPU_ATTENTION, GPU_ATTENTIONS

_aten = torch.ops.aten
PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default]
ATTENTION = [operator.default for operator in (CPU_ATTENTION, *GPU_ATTENTIONS)]
_keep_products = partial(create_selective_checkpoint_contexts, PRODUCTS)
_keep_products_and_attention = partial(create_selective_checkpoint_contexts, PRODUCTS + ATTENTION)


def run_block(block: Callable[[Tensor], Tensor], x: Tensor, how: str, drops: bool) -> Tensor:
    """Return block(x); keep for its backward what `how` says: none, selective or block.

    `drops`: the block draws random masks. Attention is then always computed again: it draws numbers
    itself, and without them the layers after it would draw their masks from another place of the
    generator's sequence.
    """
    # Without gradients nothing is kept anyway.
    if how == "none" or not torch.is_grad_enabled():
        return block(x)
    if how == "block":
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=drops)
    # selective: keep results that are expensive to compute and small to hold.
    keep = _keep_products if drops else _keep_products_and_attention
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=drops, context_fn=keep)
