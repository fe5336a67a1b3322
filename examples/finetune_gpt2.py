"""Fine-tune GPT-2 on Shakespeare, on Ray; takes every flag of nanoray.launch.

Nothing is downloaded here. Where there is internet, once (550 MB):

hf download openai-community/gpt2 --local-dir gpt2
nanoray checkpoint import gpt2 --out gpt2.safetensors
python examples/finetune_gpt2.py --workers 8 --dp_mode zero2 --precision bf16

Then, for text or for transformers:

nanoray sample runs --prompt "Shall I compare thee"
nanoray checkpoint export runs/RUN --format huggingface --out finetuned
"""

import sys

from nanoray.launch.__main__ import main

# The recipe of nanoGPT's config/finetune_shakespeare.py: 20 steps of 32 sequences at a constant rate
RECIPE = {
    "name": "finetune-gpt2",
    "init_from": "gpt2.safetensors",
    "dataset": "shakespeare",
    "tokenizer": "gpt2",
    "global_batch_size": "32",
    "micro_batch_size": "1",
    "max_steps": "20",
    "lr": "3e-5",
    "schedule": "constant",
    "warmup_steps": "0",
    "eval_every": "5",
    "eval_samples": "40",
    "checkpoint_every": "20",
    "log_every": "1",
}

if __name__ == "__main__":
    recipe = [f"--{key}={value}" for key, value in RECIPE.items()]
    # Of a flag that is given twice, the last one counts
    raise SystemExit(main([*recipe, *sys.argv[1:]]))
