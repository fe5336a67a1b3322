"""A zoo of modules of the kinds that people train, to compare every mode with plain torch.

An exhibit is a module that can be built anew with the same weights, some samples of it, and its
loss. The first value of a sample decides, where a module branches: `MARKED` samples take the branch,
so most batches have none.

Add an exhibit: write the class, and one line in `ZOO`, or in `PACKAGES` where it needs a package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

WIDTH = 8
SAMPLES = 48
# In an epoch of four batches of 12 samples, at least one batch has none of these.
MARKED = (3, 17, 30)

LossFn = Callable[[Any, Any], Tensor]

SKIPS = ""
IN_FSDP = {"fsdp": SKIPS}  # of a module that skips layers or parameters on some ranks


@dataclass(frozen=True)
class Exhibit:
    """A module of the zoo, with what it is trained on."""

    name: str
    build: Callable[[], nn.Module]
    # (seed, samples) -> inputs and targets, each a tensor or a container of tensors (samples, ...)
    batch: Callable[[int, int], Any]
    # (output, targets) -> mean over the samples; None: the module returns the loss itself
    loss: LossFn | None = functional.mse_loss
    # dp_mode -> a part of the message with which that mode refuses the module on every rank; SKIPS:
    # on some, while the others wait for them
    refused: dict[str, str] = field(default_factory=dict)
    # How far weights may be from those of plain torch; for sums that another order changes more
    tolerance: float = 2e-5

    def model(self) -> nn.Module:
        """Return the module with the same initial weights each time."""
        torch.manual_seed(0)
        return self.build()

    def dataset(self) -> Samples:
        """Return SAMPLES samples."""
        return Samples(self.batch(0, SAMPLES))

    def loss_of(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch, as RuntimeEngine computes it."""
        if self.loss is None:
            return model(inputs, targets)
        return self.loss(model(inputs), targets)


class Samples(Dataset[Any]):
    """The samples of a batch, one by one."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        tensors = torch.utils._pytree.tree_leaves(self.batch)
        return len(tensors[0])

    def __getitem__(self, index: int) -> Any:
        return torch.utils._pytree.tree_map(lambda tensor: tensor[index], self.batch)


def vectors(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs (count, WIDTH), whose first value is 1 for MARKED samples and else 0."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=source)
    inputs[:, 0] = 0.0
    for sample in MARKED:
        if sample < count:
            inputs[sample, 0] = 1.0
    return inputs, inputs.sum(1, keepdim=True).sin()


class Base(nn.Module):
    """Two layers that every sample passes, and a third one for subclasses to use."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def marked(self, x: Tensor) -> bool:
        """Return whether a sample of this batch is marked."""
        return bool((x[:, 0] > 0).any())


class UnusedHead(Base):
    """Computes a head that no loss reads, and has one that is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        self.extra(h)
        return self.head(h)


class SometimesBranch(Base):
    """Takes a branch for marked samples: in some steps on some ranks, in most on none."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        if self.marked(x):
            h = h + x[:, :1] * self.extra(h)
        return self.head(h)


class SometimesZeros(Base):
    """Uses a branch in every step; without a marked sample its gradients are zeros, and no less."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        return self.head(h + x[:, :1] * self.extra(h))


class UsedTwice(Base):
    """Applies a layer twice, and shares its weight with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.extra.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.extra(self.into(x)))
        return self.head(torch.tanh(self.tied(torch.tanh(self.extra(h)))))


class Checkpointed(Base):
    """Recomputes layers in backward; with `shared` one layer stands in two recomputed segments."""

    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.shared = shared

    def segment(self, h: Tensor) -> Tensor:
        return torch.tanh(self.extra(h))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        for _ in range(2 if self.shared else 1):
            h = checkpoint(self.segment, h, use_reentrant=self.reentrant)
        return self.head(h)


class GradientPenalty(Base):
    """Adds the square of the gradient of its output to the loss, by a backward within forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.head(torch.tanh(self.extra(torch.tanh(self.into(x)))))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return functional.mse_loss(out, y) + 0.1 * slope.square().mean()


class Freezing(Base):
    """Freezes a layer in the batches without a marked sample, and lets it train in the others."""

    def forward(self, x: Tensor) -> Tensor:
        self.extra.requires_grad_(self.marked(x))
        h = torch.tanh(self.into(x))
        return self.head(torch.tanh(h + x[:, :1] * self.extra(h)))


class HookedGradient(Base):
    """Sets a gradient outside of the graph, by a hook on another one."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = nn.Parameter(torch.zeros(WIDTH))
        self.head.weight.register_hook(self.on_gradient)

    def on_gradient(self, gradient: Tensor) -> None:
        if self.counter.grad is None:
            self.counter.grad = torch.zeros_like(self.counter)
        self.counter.grad += gradient.detach().flatten()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        return self.head(torch.tanh(self.extra(h)))


class TwoHeads(Base):
    """Returns a dict, as models of several tasks do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.into(x))
        return {"mean": self.head(h), "more": self.extra(h)}


def two_tasks(output: dict[str, Tensor], y: Tensor) -> Tensor:
    more = functional.mse_loss(output["more"], y.expand(-1, WIDTH))
    return functional.mse_loss(output["mean"], y) + 0.3 * more


ZOO: list[Exhibit] = [
    Exhibit("unused head", UnusedHead, vectors, refused={"fsdp": "got no gradient in this step"}),
    Exhibit("sometimes a branch", SometimesBranch, vectors, refused=IN_FSDP),
    Exhibit("sometimes a gradient of zeros", SometimesZeros, vectors),
    Exhibit("used twice, tied", UsedTwice, vectors),
    Exhibit("checkpoint", lambda: Checkpointed(reentrant=False), vectors),
    Exhibit("checkpoint, reentrant", lambda: Checkpointed(reentrant=True), vectors),
    Exhibit(
        "checkpoint, reentrant, shared",
        lambda: Checkpointed(reentrant=True, shared=True),
        vectors,
        refused=dict.fromkeys(
            ("ddp", "ddp_by_hand", "zero1", "zero2"), "in two parts, as torch.utils.checkpoint"
        ),
    ),
    Exhibit("gradient penalty", GradientPenalty, vectors, loss=None),
    Exhibit("frozen in some steps", Freezing, vectors, refused=IN_FSDP),
    Exhibit(
        "gradient set by a hook",
        HookedGradient,
        vectors,
        refused={"fsdp": "head.weight has a hook on its gradient"},
    ),
    Exhibit("several heads, dict output", TwoHeads, vectors, two_tasks),
]


# --- models of transformers and peft, which are imported where a model is made ---

VOCABULARY = 97


class LanguageModel(Exhibit):
    """Its samples are dicts, whose keys are the arguments of the model. It returns its loss."""

    def loss_of(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        return model(**inputs).loss


def texts(seed: int, count: int) -> dict[str, Tensor]:
    """Return tokens (count, 12), which a decoder predicts."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (count, 12), generator=source)
    return {"input_ids": tokens, "labels": tokens.clone()}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes, **no_dropout))


def lora_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.0)
    return get_peft_model(gpt2(), config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return MixtralForCausalLM(
        MixtralConfig(num_hidden_layers=2, num_local_experts=4, pad_token_id=0, **sizes, **heads)
    )


PACKAGES: list[Exhibit] = [
    LanguageModel("GPT-2, tied weights", gpt2, texts, None),
    LanguageModel("GPT-2 with LoRA of peft", lora_gpt2, texts, None),
    LanguageModel("Mixtral", mixtral, texts, None),
]
BY_NAME = {exhibit.name: exhibit for exhibit in (*ZOO, *PACKAGES)}
