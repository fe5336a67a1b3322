"""Generate text from a checkpoint: `python -m nanoray.sample runs/2026-... --prompt 'To be'
--max_new_tokens 200`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from nanoray.checkpoint.find import find_run
from nanoray.cli import exit_code_of
from nanoray.data.prepare import DatasetInfo
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.errors import CheckpointError, ConfigError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.sampling import generate
from nanoray.state import StateDict


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.sample` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nanoray.sample",
        description="Generate text from a checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path",
        nargs="?",
        default="runs",
        help="run folder, step folder, or out_dir (its newest run)",
    )
    parser.add_argument(
        "--prompt", help="text to continue [a newline, or the first token where there is none]"
    )
    parser.add_argument("--max_new_tokens", type=int, default=300, help="tokens to generate [300]")
    parser.add_argument("--num_samples", type=int, default=1, help="how many samples [1]")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 is greedy, 1 samples as trained [0.8]"
    )
    parser.add_argument(
        "--top_k", type=int, default=200, help="sample among the k most likely tokens [200]"
    )
    parser.add_argument("--seed", type=int, default=1337, help="seed of the sampling [1337]")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    args = parser.parse_args(argv)
    return exit_code_of(lambda: print("\n---\n".join(samples(args)), flush=True))


def samples(args: argparse.Namespace) -> list[str]:
    """Return the samples for these arguments. Raises CheckpointError or ConfigError."""
    try:
        source = torch.Generator(device=args.device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device = {args.device} cannot be used here; give --device cuda or cpu"
        ) from None
    state, where = load_state(Path(args.path))
    gpt, dataset = rebuild(state, torch.device(args.device))
    tokenizer = tokenizer_from_json(dataset.tokenizer)
    tokens = tokenizer.start() if args.prompt is None else tokenizer.encode(args.prompt).tolist()
    if not tokens:
        raise ConfigError("the prompt is empty; give --prompt at least one character")
    prompt = torch.tensor([tokens] * max(1, args.num_samples), device=args.device)  # (B, T)
    source.manual_seed(args.seed)
    out = generate(gpt, prompt, args.max_new_tokens, args.temperature, args.top_k, source)
    print(
        f"{where} · step {state.meta['step']} · val loss {state.meta['val_loss']}", file=sys.stderr
    )
    return [tokenizer.decode(row) for row in out.tolist()]


def load_state(path: Path) -> tuple[StateDict, Path]:
    """Load the newest valid checkpoint of a run folder, a step folder, or of the newest run in an
    out_dir.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a run folder, such as runs/2026-...")
    is_run = (
        any((path / name).exists() for name in ("state.json", "checkpoints"))
        or path.name == "checkpoints"
    )
    passed_over: list[str] = []
    found = find_run(path, str(path) if is_run else "auto", {}, passed_over=passed_over)
    if found is None:
        why = "".join(f"; {note}" for note in passed_over)
        raise CheckpointError(
            f"{path} holds no run with a valid checkpoint{why}; train first, or give another folder"
        )
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr)
    return found.state, found.path


def rebuild(state: StateDict, device: torch.device) -> tuple[GPT, DatasetInfo]:
    """Return the checkpoint's model, in evaluation mode, and the dataset that it was trained on.

    Raises CheckpointError for a model that makes no text.
    """
    kind = state.meta["dataset"].get("kind")
    if kind == "images":
        raise CheckpointError(
            "this checkpoint is of a resnet, which classifies images; give one of a gpt for text"
        )
    if kind == "own":
        raise CheckpointError(
            "this checkpoint is of a script's own model, which only that script can build; use it"
        )
    gpt = GPT(ModelShape(**state.meta["model_shape"])).to(device)
    gpt.load_state_dict(state.model)
    return gpt.eval(), DatasetInfo.from_dict(state.meta["dataset"])


if __name__ == "__main__":
    raise SystemExit(main())
