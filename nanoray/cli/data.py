"""`nanoray data tokenize|import|openwebtext|fineweb-edu`: prepare data for training.

tokenize      turn text or JSON lines into token shards
import        turn numpy's arrays of tokens (.npy) into token files
openwebtext   the 8 million web pages of the preset gpt2-124m, as GPT-2's tokens
fineweb-edu   10 billion tokens of educational web pages, as GPT-2's tokens

Each has its own --help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanoray.cli import name_program, run_subcommand, tool_parser, writing
from nanoray.data.documents import Files
from nanoray.data.hub import SETS, Hub
from nanoray.data.import_tokens import import_arrays
from nanoray.data.prepare_shards import prepare_shards
from nanoray.data.tokenizer import Tokenizer, tokenizer_from_json
from nanoray.errors import DataError

SHARD_TOKENS = 100_000_000
KINDS = ("gpt2", "byte")
TOKENIZE = """Turn text or JSON lines into token shards in llm.c's format.

A text file (.txt, .md) is one document, and its end is for validation. Of JSON lines (.jsonl, .jsonl.gz)
each line's --field is a document, and the first of every 1 / val_fraction documents is for validation.
GPT-2's tokens have <|endoftext|> after each document, bytes a newline.

    nanoray data tokenize corpus/*.jsonl --out tokens
    nanoray train --dataset tokens
"""


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "tokenize": _tokenize,
        "import": _import,
    }
    for name in SETS:
        commands[name] = partial(_prepare_set, name)
    return run_subcommand(commands, argv, __doc__)


def _tokenize(argv: list[str]) -> int:
    parser = tool_parser(name_program("data tokenize"), TOKENIZE)
    parser.add_argument("files", nargs="+", metavar="FILES", help="the files")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="|".join(KINDS),
        help="gpt2 (needs tiktoken) or byte [gpt2]",
    )
    parser.add_argument("--field", default="text", help="of a line of JSON [text]")
    _add_flags_of_shards(parser, 0.01)
    args = parser.parse_args(argv)

    files = [Path(file).expanduser().absolute() for file in args.files]
    source = Files(files, args.field, _fraction(args.val_fraction))
    _prepare(source, _parse_tokenizer(args.tokenizer), args)
    return 0


def _import(argv: list[str]) -> int:
    text = (
        "Turn a folder of .npy files into token files. Their vocabulary is that of meta.json beside "
        "them, else GPT-2's."
    )
    parser = tool_parser(name_program("data import"), text)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="train*.npy and val*.npy")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FOLDER", help="where the files go"
    )
    args = parser.parse_args(argv)
    if args.out.exists():
        raise DataError(f"{args.out} already exists; give --out another name")
    print(import_arrays(args.folder, args.out))
    return 0


def _prepare_set(name: str, argv: list[str]) -> int:
    data = SETS[name]
    doc = f"Prepare {name}: {data.what}. Needs pip install 'nanoray[hub,gpt2]'."
    parser = tool_parser(name_program(f"data {name}"), doc)
    parser.add_argument(
        "--source",
        help=f"a folder with a copy of its files, or another name on the hub [{data.path}]",
    )
    parser.add_argument(
        "--tokenizer", default="gpt2", metavar="|".join(KINDS), help="gpt2 or byte [gpt2]"
    )
    _add_flags_of_shards(parser, data.val_fraction)
    args = parser.parse_args(argv)
    tokenizer = _parse_tokenizer(args.tokenizer)
    _prepare(Hub(data, args.source, _fraction(args.val_fraction)), tokenizer, args)
    return 0


def _add_flags_of_shards(parser: Any, val_fraction: float) -> None:
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="where the shards go")
    parser.add_argument(
        "--shard_tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help=f"tokens of a shard [{SHARD_TOKENS}]",
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=val_fraction,
        metavar="X",
        help=f"share of the documents for validation; 0: none [{val_fraction:g}]",
    )


def _prepare(source: Any, tokenizer: Tokenizer, args: Any) -> None:
    if args.shard_tokens < 1:
        raise DataError(
            f"shard_tokens = {args.shard_tokens} is not above 0; leave it out, or raise it"
        )
    out = Path(args.out).expanduser().absolute()
    if out.exists():
        raise DataError(f"{out} already exists; give --out another name")
    with writing(out, "choose another folder with --out, or make room"):
        prepare_shards(source, tokenizer, out, args.shard_tokens, partial(print, flush=True))


def _fraction(value: float) -> float:
    if not 0 <= value <= 0.5:
        raise DataError(
            f"val_fraction = {value:g} is not between 0 and 0.5; choose a share between them"
        )
    return value


def _parse_tokenizer(given: str) -> Tokenizer:
    """Return a tokenizer, which can encode. Raises DataError."""
    if given not in KINDS:
        raise DataError(
            f"tokenizer = {given} is none of {', '.join(KINDS)}; choose of these, or let a run read "
            "a text: --dataset FILE --tokenizer char"
        )
    tokenizer = tokenizer_from_json({"kind": given})
    tokenizer.encode("")  # whether GPT-2's can be loaded
    return tokenizer


if __name__ == "__main__":
    raise SystemExit(main())
