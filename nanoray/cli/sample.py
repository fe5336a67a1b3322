"""Generate text from a checkpoint: `nanoray sample --prompt 'To be'`.

A file of weights, as `--init_from` reads it, will do as well.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from nanoray.checkpoint.init_from import load_weights
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.cli import RUNS, Parser, exit_code_of, name_program, tool_parser
from nanoray.cli.checkpoint import load_newest
from nanoray.config.weights import find
from nanoray.data.dataset import DatasetInfo
from nanoray.data.tokenizer import IdTokenizer, Tokenizer, tokenizer_from_json
from nanoray.errors import CheckpointError, ConfigError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.sampling import generate


def make_parser() -> Parser:
    """Return the parser of `nanoray sample`."""
    parser = tool_parser(name_program("sample"), "Generate text from a checkpoint.")
    parser.add_argument(
        "path",
        nargs="?",
        default=RUNS,
        type=Path,
        help="folder of a run, or of several: the newest of them; or a step_* folder, or a file of "
        "weights, of `nanoray checkpoint import` or `nanoray checkpoint export` [runs]",
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
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="cuda or cpu")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray sample` and return its exit code."""

    def run() -> None:
        args = make_parser().parse_args(argv)
        print("\n---\n".join(samples(args)), flush=True)

    return exit_code_of(run)


def samples(args: argparse.Namespace) -> list[str]:
    """Return the samples for these arguments. Raises CheckpointError or ConfigError."""
    _refuse_impossible(args)
    # The sampling's own generator. Making it first refuses a bad device before anything is read.
    try:
        generator = torch.Generator(device=args.device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device = {args.device} cannot be used here; give --device cuda or cpu"
        ) from None
    generator.manual_seed(args.seed)

    path = args.path.expanduser()
    device = torch.device(args.device)
    if path.is_file():
        gpt, tokenizer, title = load_file(path, device)
    else:
        folder, state = load_newest(path)
        gpt, dataset = rebuild(state, device)
        tokenizer = tokenizer_from_json(dataset.tokenizer)
        loss = state.meta["val_loss"]
        loss_text = "" if loss is None else f" · val loss {loss:.4f}"
        title = f"{folder} · step {state.meta['step']}{loss_text}"

    # An empty prompt is an error: the model needs one token to predict the next.
    if args.prompt is None:
        tokens = tokenizer.start()
    else:
        tokens = tokenizer.encode(args.prompt).tolist()
    if not tokens:
        raise ConfigError("the prompt is empty; give --prompt at least one character")

    # All samples are one batch of the same prompt.
    prompt = torch.tensor([tokens] * args.num_samples, device=args.device)  # (B, T)
    rows = generate(gpt, prompt, args.max_new_tokens, args.temperature, args.top_k, generator)

    # To stderr, so that stdout has only the text.
    print(title, file=sys.stderr)
    return [tokenizer.decode(row) for row in rows.tolist()]


def _refuse_impossible(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers with which nothing could be sampled."""
    if not 0 <= args.temperature < math.inf:
        raise ConfigError(f"temperature = {args.temperature:g}; give a number from 0 on")
    for flag, least in (("max_new_tokens", 0), ("num_samples", 1), ("top_k", 1)):
        value = getattr(args, flag)
        if value < least:
            raise ConfigError(f"{flag} = {value}; give a number from {least} on")


def load_file(path: Path, device: torch.device) -> tuple[GPT, Tokenizer, str]:
    """Return the model of a file of weights, its tokenizer, and a line on them.

    Without a known tokenizer, text is ids. Raises ConfigError.
    """
    weights = find(str(path))
    gpt = GPT(ModelShape(**weights.shape))
    load_weights(gpt, weights)
    tokenizer: Tokenizer = IdTokenizer(gpt.shape.vocab_size)
    if weights.tokenizer:
        tokenizer = tokenizer_from_json(weights.tokenizer)
    return gpt.to(device).eval(), tokenizer, str(weights.path)


def rebuild(state: StateDict, device: torch.device) -> tuple[GPT, DatasetInfo]:
    """Return the checkpoint's model, in evaluation mode, and the dataset that it was trained on.

    Raises CheckpointError for a model that generates no text.
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
