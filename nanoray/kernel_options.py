"""What the kernels and the optimizer of a step do not go with. A part of config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_kernels(config: Any, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError when the optimizer or the kernels of a Config do not go with its model or
    mesh.
    """
    if config.loss_chunk and config.tp > 1:
        raise ValueError(
            f"loss_chunk = {config.loss_chunk} would be ignored: tp = {config.tp} cuts the logits "
            "by tokens of the "
            "vocabulary; drop one of the two"
        )
    if config.loss_chunk and (config.pure or config.precision == "fp16"):
        raise ValueError(
            f"loss_chunk = {config.loss_chunk} with precision = {config.precision}: its gradients "
            "are computed before "
            "the loss is scaled, and 16 bits would lose the small ones; use precision bf16, or "
            "drop loss_chunk"
        )
    if config.attention == "cudnn" and (
        config.device == "cpu" or config.precision in ("fp32", "tf32")
    ):
        what = "device = cpu" if config.device == "cpu" else f"precision = {config.precision}"
        raise ValueError(
            f"attention = cudnn computes in 16 bits on a GPU, but {what}; use attention flash"
        )
    if config.compile == "cuda_graphs":
        _refuse_graphs(config)
    if config.device in ("cuda", "mig") and (why := cannot_audit(config)):
        raise ValueError(why)
    if config.optimizer != "muon":
        if config.muon_lr != defaults["muon_lr"]:
            raise ValueError(
                f"muon_lr = {config.muon_lr} would be ignored: optimizer = {config.optimizer}; use "
                "optimizer muon, or "
                "drop it"
            )
        return
    if config.model != "gpt":
        raise ValueError(
            f"optimizer = muon knows the matrices of a gpt, but model = {config.model}; use adamw "
            "or sgd"
        )
    if config.experts:
        raise ValueError(
            f"optimizer = muon knows models without experts, but experts = {config.experts}; use "
            "adamw"
        )
    for axis in ("tp", "pp"):
        if (size := getattr(config, axis)) > 1:
            raise ValueError(
                f"optimizer = muon needs whole matrices, but {axis} = {size}; use adamw, or drop "
                f"{axis}"
            )
    if config.dp_mode not in ("ddp", "ddp_by_hand"):
        raise ValueError(
            f"optimizer = muon needs whole matrices, and dp_mode = {config.dp_mode} shards them; "
            "use dp_mode ddp or "
            "ddp_by_hand, or optimizer adamw"
        )


def auto_on_gpus(config: Any) -> str:
    """Return the attention that `auto` is on a GPU: audits need gradients that have the same bits
    each time.
    """
    return "plain" if config.audit_every else "flash"


def cannot_audit(config: Any) -> str:
    """Return why a Config's attention does not go with its audits on a GPU, and what helps, or "".

    The backward of a fused kernel adds up in the order in which blocks of keys get ready, so the
    last bits of healthy gradients differ from one time to the next.
    """
    if not config.audit_every or config.attention not in ("flash", "cudnn"):
        return ""
    return (
        f"attention = {config.attention} on a GPU gives gradients whose last bits differ each "
        "time, so audit_every "
        f"= {config.audit_every} would find healthy ranks wrong; use attention plain, or "
        "audit_every 0"
    )


def _refuse_graphs(config: Any) -> None:
    """Raise ValueError when a Config wants CUDA graphs of layers that do more than to compute at
    fixed addresses.
    """
    reasons = {
        "device": (config.device == "cpu", "a CPU has no kernels to launch"),
        "dp_mode": (
            config.dp_mode != "ddp",
            "it keeps gradients, or weights, in buckets of its own",
        ),
        "tp": (config.tp > 1, "its ranks exchange activations within a layer"),
        "pp": (config.pp > 1, "several micro batches are in flight at once"),
        "experts": (config.experts > 0, "how many tokens an expert gets is known in the step only"),
        "sync_batchnorm": (config.sync_batchnorm, "its ranks exchange statistics within a layer"),
        "audit_every": (
            config.audit_every > 0,
            "gradients of another rank's micro batch lie beside its own",
        ),
    }
    for key, (unfit, why) in reasons.items():
        if unfit:
            raise ValueError(
                f"compile = cuda_graphs with {key} = {getattr(config, key)}: {why}, and a graph "
                "repeats what it has "
                "recorded; use compile true"
            )
