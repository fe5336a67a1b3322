"""Parameters, FLOPs and memory of a GPT."""

from __future__ import annotations

from typing import NamedTuple

from nanoray.errors import ConfigError
from nanoray.models.gpt import ModelShape
from nanoray.models.kernels import Kernels


def count_parameters(shape: ModelShape) -> int:
    """Return the parameters of GPT(shape) without building it; the tied embedding counts once, with
    its padding.
    """
    C, norm = shape.n_embd, shape.n_embd * (1 + shape.bias)
    mlp = (4 + 1) * C  # up, down
    if shape.experts:
        mlp = shape.experts * (shape.expert_hidden + C)
        mlp += shape.shared_experts * shape.expert_hidden + C * (shape.shared_experts > 0)
    biases = ((3 + 1) * C + mlp) * shape.bias  # qkv, proj
    positions = 0 if shape.rotary else shape.block_size * C
    return scaling_parameters(shape) + positions + shape.n_layer * (biases + 2 * norm) + norm


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token meets: all of them, less the experts that are not chosen
    for it.
    """
    idle = shape.experts - shape.experts_per_token
    return count_parameters(shape) - shape.n_layer * idle * expert_parameters(shape)


def told_experts(shape: ModelShape) -> str:
    """Return what a line on the model's size adds about experts; empty without any."""
    if not shape.experts:
        return ""
    shared = f" + {shape.shared_experts} shared" if shape.shared_experts else ""
    return (
        f", {active_parameters(shape):,} active: {shape.experts_per_token} of "
        f"{shape.experts}{shared} experts a token"
    )


def expert_parameters(shape: ModelShape) -> int:
    """Return the parameters of one expert of one layer; 0 without experts."""
    H, C = shape.expert_hidden, shape.n_embd
    return (2 * C * H + (H + C) * shape.bias) if shape.experts else 0


def scaling_parameters(shape: ModelShape) -> int:
    """Return nanochat's S, which sets the token budget: the blocks' matrices and lm_head (here the
    embedding, too).
    """
    C, block = shape.n_embd, (3 + 1 + 4 + 4) * shape.n_embd**2  # qkv, proj, up, down
    if shape.experts:
        block = (
            (3 + 1) * C**2
            + shape.experts * C
            + 2 * (shape.experts + shape.shared_experts) * shape.expert_hidden * C
        )
    return shape.n_layer * block + shape.padded_vocab * C


def flops_per_token(shape: ModelShape) -> int:
    """Return the FLOPs of forward and backward for one token of a full context (PaLM, Chowdhery et
    al. 2022, app. B).

    6 per parameter that the token meets, except position embeddings, and 12·L·H·Q·T for attention
    with H heads of size Q, counted as if it were not causal. nanoGPT uses the same formula, so MFU
    values are comparable.
    """
    L, C, T = shape.n_layer, shape.n_embd, shape.block_size
    return 6 * (active_parameters(shape) - (0 if shape.rotary else T * C)) + 12 * L * C * T


class Cut(NamedTuple):
    """The ranks that share a replica's layers, and whether they also share the stream's positions."""

    tp: int = 1
    ep: int = 1
    sequence: bool = False

    @property
    def parts(self) -> int:
        """Ranks among which the positions between layers are cut."""
        return self.tp if self.sequence else 1


def activation_memory(
    shape: ModelShape,
    micro_batch_size: int,
    precision: str,
    kept: str = "none",
    cut: Cut = Cut(),  # noqa: B008
    batches: int = 1,
    ends: tuple[bool, bool] = (True, True),
) -> dict[str, int]:
    """Return the bytes that one rank holds for a micro batch at the peak of a step, eager, without
    dropout.

    Of a chunk of a pipeline's layers, n_layer is theirs, `batches` is how many micro batches wait
    for their backward, `ends` tells whether it begins the model, and whether it ends it.

    - copies       of the matrices in 2 bytes, made by autocast
    - activations  kept for backward, per token: each block 2·C float32 (inputs of its norms), 14·C in the compute
                   dtype (qkv's input, 3 q k v, proj's, up's, 4 gelu's, 4 down's) and H float32 (attention's
                   log-sum-exp); the last norm C float32, lm_head C; 2 float32 per norm; 8 for idx, 8 for its target.
                   With activation checkpointing (`kept` block or selective): each block's input, C float32, and with
                   selective 10·C (3 q k v, attention's, proj's, 4 up's, down's results) and H float32; and once, for
                   the block that is computed again, the rest of the above. Tensor parallelism divides all of it but
                   the inputs of norms, of qkv and of up, and with selective the results of proj and down. With
                   sequence parallelism it also divides the inputs of norms, and of blocks. Rotary positions add 2·C:
                   q and k as they were turned, beside those that qkv returned.
                   For a mixture of experts see `_experts_memory`
                   With weights of 16 bits there are no copies, and what is float32 above but log-sum-exp has 2 bytes
    - logits       two float32 tensors (B, T, columns): logits, log-softmax; under autocast a 2-byte one before them;
                   for each further micro batch that waits, its log-softmax
    """
    if precision not in _SIZES:
        raise ConfigError(
            f"no memory estimate for precision = {precision}; use one of {', '.join(_SIZES)}"
        )
    half, size, wide = _SIZES[precision]
    C, L, H, tokens = shape.n_embd, shape.n_layer, shape.n_head, micro_batch_size * shape.block_size
    (tp, ep, _), stream, norms = cut, wide * C // cut.parts, 2 * 2 * wide // cut.parts
    turned = 2 * size * C // tp * shape.rotary
    block = 2 * stream + 2 * size * C + (12 * size * C + 4 * H) // tp + norms + turned
    again = stream + 2 * size * C + 4 * size * C // tp + norms + turned
    blocks, once = {
        "none": (L * block, 0),
        "selective": (L * (stream + 2 * size * C + (8 * size * C + 4 * H) // tp), again),
        "block": (L * stream, block - stream),
    }[kept]
    if shape.experts:
        kept_by_experts, again_of_experts = _experts_memory(shape, size, kept, cut)
        heads = (4 * size * C + 4 * H) // tp
        attention, again = (
            2 * stream + size * C + heads + norms,
            stream + size * C + norms + again_of_experts,
        )
        attention, again = attention + turned, again + turned
        blocks, once = {
            "none": (L * (attention + kept_by_experts), 0),
            "selective": (L * (stream + size * C + heads + kept_by_experts), again),
            "block": (L * stream, attention - stream + again_of_experts),
        }[kept]
    first, last = ends
    at_ends = 8 * first + (stream + size * C + norms // 2 + 8) * last
    # Experts of other ranks
    elsewhere = L * (shape.experts - shape.experts // ep) * 2 * C * shape.expert_hidden
    columns = shape.logit_columns if tp == 1 else shape.padded_vocab // tp
    if precision == "fp8":  # what its own products round is not kept
        elsewhere = scaling_parameters(shape) - shape.padded_vocab * C
    copied = scaling_parameters(shape) - (0 if last else shape.padded_vocab * C)
    return {
        "copies": 2 * half * (copied - elsewhere) // tp * (1 if kept == "block" else batches),
        "activations": tokens * (batches * (blocks + at_ends) + once),
        "logits": tokens * columns * (8 + 2 * (size == 2) + 4 * (batches - 1)) * last,
    }


# precision: whether autocast copies the weights, bytes in the compute dtype, bytes of the residual
# stream
_SIZES = {
    "fp32": (False, 4, 4),
    "tf32": (False, 4, 4),
    "bf16": (True, 2, 4),
    "fp16": (True, 2, 4),
    "fp8": (True, 2, 4),
}
_SIZES |= {"bf16_pure": (False, 2, 2), "fp16_pure": (False, 2, 2)}


def with_kernels(
    parts: dict[str, int],
    shape: ModelShape,
    micro_batch_size: int,
    precision: str,
    kernels: Kernels,
    kept: str,
    tp: int,
) -> dict[str, int]:
    """Return `activation_memory` of one micro batch for a model that computes in other ways.

    Plain attention keeps, per block and token, a number for each head and position, in place of
    flash's log-sum-exp. While a block is computed, two more such matrices are there. With
    activation checkpointing `block`, one block's are kept. A chunked loss has the logits of a chunk
    only, in float32, and under autocast beside the product's; and the gradient of lm_head, (V, C)
    float32, twice. That of its input lies where the input would.
    """
    size, tokens = _SIZES[precision][1], micro_batch_size * shape.block_size
    parts = dict(parts)
    if kernels.attention == "plain" and parts["activations"]:
        matrix = tokens * shape.n_head * shape.block_size * size // tp
        blocks = 1 if kept == "block" else shape.n_layer
        parts["activations"] += blocks * (matrix - 4 * tokens * shape.n_head // tp) + 2 * matrix
        # Rotated queries and keys: it keeps them in the place of their scaled copies.
        turned = 2 * tokens * size * shape.n_embd // tp * shape.rotary
        parts["activations"] -= turned * (shape.n_layer if kept == "none" else 1)
    if kernels.loss_chunk and parts.get("logits"):
        chunk = min(kernels.loss_chunk, tokens)
        parts["logits"] = chunk * shape.vocab_size * (4 if size == 4 else 6)
        parts["logits"] += 2 * 4 * shape.padded_vocab * shape.n_embd
    return parts


def _experts_memory(shape: ModelShape, size: int, kept: str, cut: Cut) -> tuple[int, int]:
    """Return the bytes per token that the experts of a block keep for backward, and those computed
    again.

    For each of the k experts of a token: it, its result, where they lie, in and out of GELU. Once:
    the router's input in float32, logits and probabilities, and what the shared experts keep. With
    expert parallelism, of the tokens that come to the rank's experts, which are as many if the load
    is even. Tensor parallelism divides the hidden units, sequence parallelism the router's input.
    """
    C, E, k, hidden = (
        shape.n_embd,
        shape.experts,
        shape.experts_per_token,
        shape.expert_hidden // cut.tp,
    )
    shared = shape.shared_experts * hidden
    cast = size * C * (shared > 0 and size == 2)  # the input of the shared ones, under autocast
    everything = (
        4 * C // cut.parts
        + cast
        + k * ((2 * hidden + 3 * C) * size + 3 * 8)
        + 4 * 2 * E
        + 8
        + 2 * shared * size
    )
    # With selective, what need not be computed again
    products = (k * hidden + shared) * size + 4 * E
    if kept == "selective":
        return products + (k + (shared > 0)) * C * size, everything - products
    return everything, everything if kept == "block" else 0
