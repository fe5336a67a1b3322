"""Models of public packages, small enough for a test: Hugging Face transformers, peft and timm.

A package is imported where a model of it is made, so that a list of tests imports none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
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


def pictures(seed: int, count: int) -> dict[str, Tensor]:
    """Return pictures (count, 3, 16, 16) and classes (count,)."""
    pixels = torch.randn(count, 3, 16, 16, generator=seeded(seed))
    return {"pixel_values": pixels, "labels": torch.arange(count) % 4}


def sounds(seed: int, count: int) -> dict[str, Tensor]:
    """Return waves (count, 800) and classes (count,)."""
    waves = torch.randn(count, 800, generator=seeded(seed))
    return {"input_values": waves, "labels": torch.arange(count) % 4}


def classified_pictures(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return pictures and classes as a pair, for a model that returns scores."""
    batch = pictures(seed, count)
    return batch["pixel_values"], batch["labels"]


# --- transformers ---


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_positions=32, **sizes, **tokens, **settings))


def checkpointed_gpt2() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable()
    return model


def lora_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.0)
    return get_peft_model(gpt2(), config)


def decoder(kind: str, config: str, **settings: Any) -> nn.Module:
    """Return a causal language model of transformers, by the names of its class and its config."""
    import transformers

    made = getattr(transformers, config)(**DECODER, **settings)
    return getattr(transformers, kind)(made)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(num_layers=2, decoder_start_token_id=0, **sizes))


ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **ENCODER))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=8, num_labels=4, **ENCODER)
    )


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    quiet = {"layerdrop": 0.0, "mask_time_prob": 0.0, "num_labels": 4}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            vocab_size=VOCABULARY,
            classifier_proj_size=16,
            **convolutions,
            **quiet,
            **positions,
            **ENCODER,
        )
    )


# --- timm ---


def timm_model(name: str, **settings: Any) -> nn.Module:
    """Return a classifier of timm, whose import needs torchvision."""
    define_operators_of_torchvision()
    from timm import create_model

    return create_model(name, num_classes=4, **settings)


def define_operators_of_torchvision() -> None:
    """Let torchvision be imported where its library of operators cannot be loaded.

    Its wheels for Linux need CUDA's libraries, which a torch for CPUs does not bring.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", arguments)


class Package(Kind):
    """A model of a package, which is called as its users call it."""

    def loss_of(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        if self.loss is None:
            return model(**inputs).loss
        return self.loss(model(inputs), targets)


SMALL_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

PACKAGES: list[Kind] = [
    Package("GPT-2, tied weights", partial(gpt2, **NO_DROPOUT), texts, None, everyday=True),
    Package("GPT-2 with dropout", gpt2, texts, None, apart=True),
    Package("GPT-2, gradient checkpointing", checkpointed_gpt2, texts, None, apart=True),
    Package("GPT-2 with LoRA of peft", lora_gpt2, texts, None, apart=True, everyday=True),
    Package(
        "Llama", partial(decoder, "LlamaForCausalLM", "LlamaConfig"), texts, None, everyday=True
    ),
    Package("Gemma 3", partial(decoder, "Gemma3ForCausalLM", "Gemma3TextConfig"), texts, None),
    Package(
        "Mixtral",
        partial(decoder, "MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
        texts,
        None,
        everyday=True,
    ),
    Package("T5", t5, texts, None, apart=True),
    Package("BERT", bert, texts, None, apart=True, everyday=True),
    Package("ViT", vit, pictures, None),
    Package("Wav2Vec2", wav2vec2, sounds, None, apart=True),
]

TIMM: list[Kind] = [
    Package(
        "ResNet of timm",
        partial(timm_model, "resnet10t"),
        classified_pictures,
        F.cross_entropy,
        apart=True,
    ),
    Package(
        "vision transformer of timm",
        partial(timm_model, "vit_tiny_patch16_224", **SMALL_VIT),
        classified_pictures,
        F.cross_entropy,
    ),
]
