"""Models of public packages, small enough for a test: Hugging Face transformers and peft.

A package is imported where a model of it is made, so that a list of tests imports none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.zoo_public import Kind, seeded

VOCABULARY = 97
LENGTH = 12
WIDTH = 32
# Names and sizes that the decoders of transformers share
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# --- samples: dicts, whose keys are the arguments of the model ---


def texts(seed: int, count: int) -> dict[str, Tensor]:
    """Return tokens (count, LENGTH), which a decoder predicts."""
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=seeded(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


# --- transformers ---


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_positions=32, **sizes, **tokens, **settings))


def lora_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.0)
    return get_peft_model(gpt2(), config)


def decoder(kind: str, config: str, **settings: Any) -> nn.Module:
    """Return a causal language model of transformers, by the names of its class and its config."""
    import transformers

    made = getattr(transformers, config)(**DECODER, **settings)
    return getattr(transformers, kind)(made)


ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **ENCODER))


class Package(Kind):
    """A model of a package, which is called as its users call it."""

    def loss_of(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        if self.loss is None:
            return model(**inputs).loss
        return self.loss(model(inputs), targets)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

PACKAGES: list[Kind] = [
    Package("GPT-2, tied weights", partial(gpt2, **NO_DROPOUT), texts, None),
    Package("GPT-2 with LoRA of peft", lora_gpt2, texts, None, apart=True),
    Package(
        "Mixtral",
        partial(decoder, "MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
        texts,
        None,
    ),
    Package("BERT", bert, texts, None, apart=True),
]
