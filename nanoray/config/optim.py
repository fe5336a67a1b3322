"""Keys of the optimizer, its schedule and the number formats of a step."""

from __future__ import annotations

from typing import Literal

from nanoray.config.fields import Group, Natural, Positive, field


class OptimKeys(Group):
    """The optimizer and its schedule, the number formats, and the kernels that compute a step."""

    # Number formats
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_pure", "fp8"] = (
        field("auto", "optim")
    )
    """auto (the fastest one that is safe on this device, printed with its reason) | fp32 | tf32
    (GPUs) | bf16 | fp16 (with a loss scaler) | bf16_pure | fp16_pure (weights, gradients and
    optimizer state in 16 bits) | fp8 (products of 8-bit floats; emulated where the hardware has
    none); see docs/precision.md"""

    fp8_scaling: Literal["tensor", "row"] = field("tensor", "optim")
    """precision fp8: one scale for each tensor | for each row"""

    master_weights: Literal["none", "fp32"] = field("none", "optim")
    """precision bf16_pure and fp16_pure: none | fp32 (the optimizer keeps weights and moments in
    float32, so that no small update is lost)"""

    rounding: Literal["nearest", "stochastic"] = field("nearest", "optim")
    """precision bf16_pure: how an update is rounded: nearest | stochastic (up or down at random, so
    that small updates add up)"""

    # Kernels: the same mathematics, computed otherwise
    attention: Literal["auto", "flash", "cudnn", "plain"] = field("auto", "optim")
    """gpt: flash (torch's fused kernel) | cudnn (cuDNN's, on GPUs and in 16 bits) | plain (two
    products and a softmax, which take more memory) | auto (plain where it was measured to win, and
    on GPUs with audits; else flash)"""

    loss_chunk: Natural = field(0, "optim")
    """gpt: tokens whose logits are in memory at a time (0 = all of a micro batch); 1024 saves most
    of their memory where the vocabulary is large"""

    # Beside lr, since an orthogonal update has another scale than one of adamw
    muon_lr: float = field(0.02, "optim", gt=0)
    """optimizer muon: peak learning rate of the blocks' matrices; lr is that of all else, and both
    follow the same schedule"""

    # What ranks send of their gradients. It changes the result, so it is a key of the recipe
    grad_compress: Literal["none", "bf16", "fp16"] = field("none", "optim")
    """dp_mode ddp_by_hand: type in which ranks send gradients: none (float32) | bf16 | fp16 (half
    the bytes, another result: see docs/precision.md)"""

    # Length of the schedule
    max_steps: Positive = field(2000, "optim")
    """optimizer steps of the whole schedule"""

    num_epochs: Natural = field(0, "optim")
    """in place of max_steps: how often the schedule goes through the training data (0 = max_steps
    counts)"""

    # Optimizer
    optimizer: Literal["adamw", "sgd", "muon"] = field("adamw", "optim")
    """adamw (fused) | sgd (plain unless given momentum) | muon (of a gpt: orthogonal updates of the
    blocks' matrices, adamw for all else)"""

    momentum: float = field(0.0, "optim", ge=0, lt=1)
    """sgd: decay of the sum of past gradients (0 = plain)"""

    nesterov: bool = field(False, "optim")
    """optimizer sgd with momentum: look ahead along the sum of gradients"""

    label_smoothing: float = field(0.0, "optim", ge=0, lt=1)
    """resnet: share of a label that is spread over all classes, while training"""

    # Learning rate
    lr: float = field(1e-3, "optim", gt=0)
    """peak learning rate"""

    min_lr: float = field(1e-4, "optim", ge=0)
    """learning rate at the end of the schedule"""

    schedule: Literal["cosine", "wsd", "constant"] = field("cosine", "optim")
    """cosine | wsd (warm-up, stable, linear decay) | constant, all after a linear warm-up"""

    warmup_steps: Natural = field(100, "optim")
    """steps of linear warm-up"""

    decay_fraction: float = field(0.65, "optim", gt=0, le=1)
    """wsd: the last part of the steps, over which the rate falls linearly to min_lr"""

    # The update
    weight_decay: float = field(0.1, "optim", ge=0)
    """decay of matrices, convolutions and embeddings: AdamW's decoupled one, or added to the
    gradient by sgd with momentum; plain sgd has none"""

    beta1: float = field(0.9, "optim", ge=0, lt=1)
    """AdamW: decay of the first moment"""

    beta2: float = field(0.99, "optim", ge=0, lt=1)
    """AdamW: decay of the second moment"""

    grad_clip: float = field(1.0, "optim", ge=0)
    """clip gradients to this global norm (0 = off)"""

    # Off by default: compiling takes longer than a short run gains
    compile: bool | Literal["cuda_graphs"] = field(False, "optim")
    """torch.compile each block, or an own model's layers: slower start, faster steps on GPUs.
    cuda_graphs: also launch the kernels of each at once"""

    def check(self) -> None:
        """Raise ValueError for a schedule that would rise at its end."""
        # A constant rate has no end to fall to
        if self.schedule != "constant" and self.min_lr > self.lr:
            raise ValueError(
                f"min_lr = {self.min_lr} is above lr = {self.lr}; lower min_lr or raise lr"
            )

    @property
    def pure(self) -> bool:
        """Whether weights and gradients have 16 bits."""
        return self.precision.endswith("_pure")
