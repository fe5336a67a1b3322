"""Count the parameters, FLOPs and bytes of a GPT without building it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.models.gpt import ModelShape
from nanoray.models.kernels import Kernels
from nanoray.models.weights import Weights, weights_of

# Parameters.


def count_parameters(shape: ModelShape) -> int:
    """Return the parameters of GPT(shape); the tied embedding counts once, with its padding."""
    return sum(tensor.numel for tensor in weights_of(shape))


@lru_cache(maxsize=256)  # of the chunks of pipelines, which a search asks for again and again
def matrix_parameters(shape: ModelShape) -> int:
    """Return the parameters of the blocks' matrices and of lm_head, which is the embedding, too."""
    return sum(tensor.numel for tensor in weights_of(shape) if tensor.matrix)


def active_parameters(shape: ModelShape) -> int:
    """Return the parameters that one token uses: all, without the experts not chosen for it."""
    return sum(used_by_token(shape, tensor) for tensor in weights_of(shape))


def used_by_token(shape: ModelShape, tensor: Weights) -> int:
    """Return the parameters of a tensor that one token uses: of the experts those chosen for it."""
    if tensor.expert:
        return tensor.numel * shape.experts_per_token // shape.experts
    return tensor.numel


def describe_experts(shape: ModelShape) -> str:
    """Return what a line on the model's size adds about experts; empty without any."""
    if not shape.experts:
        return ""
    shared = f" + {shape.shared_experts} shared" if shape.shared_experts else ""
    return (
        f", {active_parameters(shape):,} active: {shape.experts_per_token} of "
        f"{shape.experts}{shared} experts a token"
    )


# FLOPs.


def flops_per_token(shape: ModelShape) -> int:
    """Return the FLOPs of forward and backward for one token of a full context.

    6 per parameter that the token uses, except position embeddings, and 12·L·H·Q·T for attention
    with H heads of size Q, counted as if it were not causal (PaLM, Chowdhery et al. 2022, app. B).
    nanoGPT uses the same formula, so MFU values are comparable.
    """
    L = shape.n_layer
    C = shape.n_embd
    T = shape.block_size
    positions = 0 if shape.rotary else T * C
    return 6 * (active_parameters(shape) - positions) + 12 * L * C * T


# Bytes.


class Cut(NamedTuple):
    """The ranks that share a replica's layers and sequences.

    `sequence`: tensor ranks also share the stream's positions.
    """

    tp: int = 1
    ep: int = 1
    sequence: bool = False
    cp: int = 1

    @classmethod
    def of(cls, config: Config) -> Cut:
        """Return the cut of a configuration."""
        return cls(config.tp, config.ep, config.sequence_parallel, config.cp)

    @property
    def parts(self) -> int:
        """Ranks among which the positions between layers are cut."""
        return self.tp if self.sequence else 1

    def tokens(self, shape: ModelShape, sequences: int) -> int:
        """Return the tokens that a rank has of `sequences`: all of them, unless cp cuts."""
        return sequences * shape.block_size // self.cp


class _NumberSizes(NamedTuple):
    """How large numbers are in a precision."""

    copied: bool  # autocast copies the weights, in 2 bytes
    compute: int  # bytes in the compute dtype
    stream: int  # bytes in the residual stream


_NUMBER_SIZES = {
    "fp32": _NumberSizes(copied=False, compute=4, stream=4),
    "tf32": _NumberSizes(copied=False, compute=4, stream=4),
    "bf16": _NumberSizes(copied=True, compute=2, stream=4),
    "fp16": _NumberSizes(copied=True, compute=2, stream=4),
    "fp8": _NumberSizes(copied=True, compute=2, stream=4),
    "bf16_pure": _NumberSizes(copied=False, compute=2, stream=2),
    "fp16_pure": _NumberSizes(copied=False, compute=2, stream=2),
}


def activation_memory(
    shape: ModelShape,
    micro_batch_size: int,
    precision: str,
    kept: str = "none",
    cut: Cut = Cut(),  # noqa: B008
    batches: int = 1,
    ends: tuple[bool, bool] = (True, True),
) -> dict[str, int]:
    """Return the bytes of one rank for a micro batch at the peak of a step, eager, without dropout.

    `kept` is the setting of activation checkpointing. Of a chunk of a pipeline's layers, n_layer is
    theirs, `batches` is the number of micro batches that wait for their backward, and `ends` is
    whether the chunk begins the model, and whether it ends it.

    - copies       of the matrices in 2 bytes, made by autocast; none with weights of 16 bits
    - activations  kept for backward: see `_block_memory`; for a mixture of experts also
                   `_experts_memory`. At the ends, per token: 8 for idx; the last norm's input in the
                   stream's dtype and 2 numbers of it, lm_head's input, 8 for the target
    - logits       two float32 tensors (B, T, columns): logits, log-softmax; under autocast a 2-byte
                   one before them; for each further micro batch that waits, its log-softmax
    """
    if precision not in _NUMBER_SIZES:
        raise ConfigError(
            f"no memory estimate for precision = {precision}; use one of {', '.join(_NUMBER_SIZES)}"
        )
    sizes = _NUMBER_SIZES[precision]
    C = shape.n_embd
    tokens = cut.tokens(shape, micro_batch_size)
    begins_model, ends_model = ends

    # Activations. What is computed again exists for one block and one micro batch at a time.
    per_block, recomputed = _block_memory(shape, sizes, kept, cut)
    at_ends = 0
    if begins_model:
        at_ends += 8  # idx
    if ends_model:
        norm = sizes.stream * C // cut.parts + 2 * sizes.stream // cut.parts
        at_ends += norm + sizes.compute * C + 8
    per_token = batches * (shape.n_layer * per_block + at_ends) + recomputed

    # Autocast copies this rank's matrices, and keeps a copy as long as a backward needs it.
    copies = 0
    if sizes.copied:
        embedding = shape.padded_vocab * C
        copied = matrix_parameters(shape)
        if not ends_model:
            copied -= embedding  # only the last stage multiplies by lm_head
        if precision == "fp8":  # the 8-bit operands of the blocks' products are not kept
            copied -= matrix_parameters(shape) - embedding
        else:
            experts_elsewhere = shape.experts - shape.experts // cut.ep
            copied -= shape.n_layer * experts_elsewhere * 2 * C * shape.expert_hidden
        copies = 2 * copied // cut.tp
        if kept != "block":
            copies *= batches

    # Logits and their log-softmax, in float32.
    logits = 0
    if ends_model:
        columns = shape.logit_columns if cut.tp == 1 else shape.padded_vocab // cut.tp
        per_logit = 2 * 4 + 4 * (batches - 1)
        if sizes.compute == 2:
            per_logit += 2
        logits = tokens * columns * per_logit
    return {"copies": copies, "activations": tokens * per_token, "logits": logits}


def _block_memory(shape: ModelShape, sizes: _NumberSizes, kept: str, cut: Cut) -> tuple[int, int]:
    """Return the bytes per token that a block keeps for backward, and those computed again.

    Without checkpointing: 2·C in the stream's dtype (inputs of its norms), 14·C in the compute
    dtype (qkv's input, 3 q k v, proj's input, up's, 4 gelu's, 4 down's), H float32 (attention's
    log-sum-exp), 2 numbers per norm. Rotary positions add 2·C: q and k as they were turned, beside
    those that qkv returned.

    With `block`: the block's input, C. With `selective`: that, 10·C (3 q k v, attention's result,
    proj's, 4 up's, down's) and H float32. What is missing is computed again, for one block.

    Tensor parallelism divides all of it but the inputs of norms, of qkv and of up, and with
    selective the results of proj and down. Sequence parallelism also divides the inputs of norms,
    and of blocks.
    """
    C = shape.n_embd
    # `//` throughout: a rank holds a whole number of bytes of a divided tensor.
    tp = cut.tp
    compute = sizes.compute
    stream = sizes.stream * C // cut.parts
    norms = 2 * 2 * sizes.stream // cut.parts
    log_sum_exp = 4 * shape.n_head
    turned = 2 * compute * C // tp if shape.rotary else 0

    if shape.experts:
        kept_by_experts, recomputed_by_experts = _experts_memory(shape, compute, kept, cut)
        # In place of the MLP, a block has the router and the experts.
        heads = (4 * compute * C + log_sum_exp) // tp  # q k v, proj's input
        attention = 2 * stream + compute * C + heads + norms + turned
        if kept == "none":
            return attention + kept_by_experts, 0
        if kept == "selective":
            results = stream + compute * C + heads + kept_by_experts
            return results, stream + compute * C + norms + recomputed_by_experts + turned
        return stream, attention - stream + recomputed_by_experts

    everything = 2 * stream + 2 * compute * C + (12 * compute * C + log_sum_exp) // tp
    everything += norms + turned
    if kept == "none":
        return everything, 0
    if kept == "selective":
        results = stream + 2 * compute * C + (8 * compute * C + log_sum_exp) // tp
        return results, stream + 2 * compute * C + 4 * compute * C // tp + norms + turned
    return stream, everything - stream


def _experts_memory(shape: ModelShape, compute: int, kept: str, cut: Cut) -> tuple[int, int]:
    """Return the bytes per token that a block's experts keep for backward, and those recomputed.

    For each of the k experts of a token: its input, its result, their indices, in and out of GELU.
    Once: the router's input in float32, logits and probabilities, and what the shared experts keep.
    With expert parallelism, of the tokens that arrive at the rank's experts: the same number if the
    load is even. Tensor parallelism divides the hidden units, sequence parallelism the router's
    input.
    """
    C = shape.n_embd
    E = shape.experts
    k = shape.experts_per_token
    hidden = shape.expert_hidden // cut.tp
    shared = shape.shared_experts * hidden  # hidden units of the shared experts

    per_expert = (2 * hidden + 3 * C) * compute + 3 * 8
    router = 4 * C // cut.parts + 2 * 4 * E + 8
    everything = router + k * per_expert + 2 * shared * compute
    if shared and compute == 2:
        everything += compute * C  # the input of the shared ones, as autocast casts it
    if kept == "none":
        return everything, 0
    if kept == "selective":
        # The results of matrix products are kept, so these need not be computed again.
        products = (k * hidden + shared) * compute + 4 * E
        results = k + 1 if shared else k  # of down, C each
        return products + results * C * compute, everything - products
    return everything, everything


def with_kernels(
    parts: dict[str, int],
    shape: ModelShape,
    micro_batch_size: int,
    precision: str,
    kernels: Kernels,
    kept: str,
    cut: Cut = Cut(),  # noqa: B008
) -> dict[str, int]:
    """Return `activation_memory` of one micro batch for a model with other kernels.

    Plain attention keeps, per block and token, a number for each head and position, in place of
    flash's log-sum-exp. While a block is computed, there are two more such matrices. With activation
    checkpointing `block`, only one block's matrices are kept.

    Context parallelism has an attention of its own. The ring keeps what flash keeps, whatever
    computes a block: see `ring_memory`.

    A chunked loss has the logits of a chunk only, in float32, and under autocast beside the
    product's; and the gradient of lm_head, (V, C) float32, twice. The gradient of its input takes
    the place of the input.
    """
    compute = _NUMBER_SIZES[precision].compute
    tokens = cut.tokens(shape, micro_batch_size)
    tp = cut.tp
    parts = dict(parts)

    if kernels.attention == "plain" and cut.cp == 1 and parts["activations"]:
        matrix = tokens * shape.n_head * shape.block_size * compute // tp
        log_sum_exp = 4 * tokens * shape.n_head // tp
        blocks = 1 if kept == "block" else shape.n_layer
        parts["activations"] += blocks * (matrix - log_sum_exp) + 2 * matrix
        if shape.rotary:
            # It keeps rotated queries and keys in the place of their scaled copies.
            turned = 2 * tokens * compute * shape.n_embd // tp
            parts["activations"] -= turned * (shape.n_layer if kept == "none" else 1)

    if kernels.loss_chunk and parts.get("logits"):
        # float32 logits of one chunk; under autocast also the product's 2-byte result.
        chunk = min(kernels.loss_chunk, tokens)
        per_logit = 4 if compute == 4 else 4 + 2
        parts["logits"] = chunk * shape.logit_columns * per_logit
        parts["logits"] += 2 * 4 * shape.padded_vocab * shape.n_embd
    return parts


def ring_memory(
    shape: ModelShape, micro_batch_size: int, precision: str, kernels: Kernels, cut: Cut
) -> int:
    """Return the most bytes that the ring of one block's attention takes beside what is kept.

    They are there for one block and one micro batch at a time. In its backward, per own token and
    head's number: keys and values of the block that is there and of the next one, in the compute
    dtype; in float32 dq, dk and dv of the block that is there and of the one before, and what this
    pass adds to dq, dk and dv. Plain blocks also have four matrices of float32: scores, weights and
    the gradients of both.
    """
    if cut.cp == 1:
        return 0
    compute = _NUMBER_SIZES[precision].compute
    tokens = cut.tokens(shape, micro_batch_size)
    numbers = tokens * shape.n_embd // cut.tp
    size = numbers * (4 * compute + 8 * 4)
    if kernels.attention == "plain":
        own = shape.block_size // cut.cp
        size += 4 * 4 * tokens * own * shape.n_head // cut.tp
    return size
