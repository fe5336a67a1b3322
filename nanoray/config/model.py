"""Keys of the model: a GPT, its experts, or a ResNet."""

from __future__ import annotations

from typing import Literal

from nanoray.config.fields import Group, Natural, Positive, field, hidden, path


class ModelKeys(Group):
    """The model: its kind and its sizes."""

    # Mixture of experts. The defaults of its keys count only where experts is above 0
    experts: Natural = field(0, "model")
    """gpt: experts in place of each block's MLP, of which a router chooses some for each token (0 =
    one MLP)"""

    experts_per_token: Positive = field(2, "model")
    """experts that each token goes to (top k)"""

    expert_hidden: Natural = field(0, "model")
    """hidden units of an expert (0 = 4 x n_embd, as an MLP has)"""

    shared_experts: Natural = field(0, "model")
    """experts that every token goes to, beside those chosen for it"""

    balance_loss: float = field(0.01, "model", ge=0)
    """factor of the loss that spreads the tokens of each sequence over the experts; no logged loss
    contains it"""

    z_loss: float = field(0.001, "model", ge=0)
    """factor of the loss that keeps the router's logits small; no logged loss contains it"""

    # Where the weights of step 0 come from
    init_from: str = path("", "model")
    """gpt: begin with the weights of FILE, made by `nanoray checkpoint import` or `nanoray
    checkpoint export`. They decide sizes, biases and the form of GELU; a smaller block_size crops
    the positions"""

    # The form of an activation, which is a part of what the weights mean
    gelu: Literal["exact", "tanh"] = field("exact", "model")
    """gpt: exact (as nanoGPT) | tanh (the approximation that GPT-2 was trained with)"""

    # What a gpt adds to its tokens
    positions: Literal["learned", "rotary"] = field("learned", "model")
    """gpt: learned (an embedding of each position) | rotary (queries and keys are turned by their
    positions)"""

    # Which model, and the ResNet
    model: Literal["gpt", "resnet", "own"] = field("gpt", "model")
    """gpt (text) | resnet (images: the ResNet for CIFAR-10 of He et al. 2016) | own (a module of
    your script: see nanoray.launch and examples/own_model.py)"""

    resnet_depth: Positive = field(20, "model")
    """layers of the resnet: 6n + 2, so 8, 14, 20, 32, 44, 50, ..."""

    resnet_width: Positive = hidden(1, "model")
    """fixed: factor on the resnet's 16, 32 and 64 channels"""

    sync_batchnorm: bool = field(False, "model")
    """batch norms: normalise by the micro batches of all ranks together, not by each rank's own"""

    # The GPT; the defaults are those of nanoGPT's recipe for a CPU
    n_layer: Positive = field(4, "model")
    """transformer blocks"""

    n_head: Positive = field(4, "model")
    """attention heads; must divide n_embd"""

    n_embd: Positive = field(128, "model")
    """width of the residual stream"""

    block_size: Positive = field(64, "model")
    """context length in tokens; attention memory grows with it, so halve it when a micro batch of 1
    does not fit"""

    dropout: float = field(0.0, "model", ge=0, lt=1)
    """dropout probability while training"""

    bias: bool = field(False, "model")
    """biases in linear layers and layer norms, as in GPT-2"""

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit each other."""
        if self.n_embd % self.n_head:
            nearest = self.n_embd // self.n_head * self.n_head
            raise ValueError(
                f"n_embd = {self.n_embd} is not a multiple of n_head = {self.n_head}; "
                f"try n_embd {nearest or self.n_head}"
            )

        depth = self.resnet_depth
        if depth < 8 or (depth - 2) % 6:
            nearest = max(8, round((depth - 2) / 6) * 6 + 2)
            raise ValueError(
                f"resnet_depth = {depth} is not 6n + 2 (8, 14, 20, 32, 44, 50, ...); try {nearest}"
            )

        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is above experts = {self.experts}; "
                "lower it, or raise experts"
            )
