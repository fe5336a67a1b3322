"""`nanoray checkpoint list|verify|show|export`: list, verify, inspect and export checkpoints.

list     step, size, validation loss of each checkpoint of a run; checks sizes and manifest only
verify   read every byte and compare the checksums; exit 1 if one is damaged
show     metadata and tensors of one checkpoint
export   the model alone, as load_state_dict takes it: FILE.safetensors, with the model's shape in
         its header, or FILE.pt (torch.save), which also holds extra states; for other tools
         --format huggingface (a folder for transformers) or nanogpt (its ckpt.pt)
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from nanoray.checkpoint.export import FORMATS, format_of, write_model
from nanoray.checkpoint.files import find_all, load, peek
from nanoray.checkpoint.find import newest_valid
from nanoray.cli import Parser, name_program, run_subcommand, tool_parser, writing
from nanoray.errors import CheckpointError, ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    return run_subcommand(
        {"list": _list, "verify": _verify, "show": _show, "export": _export}, argv, __doc__
    )


def _parser(command: str, text: str) -> Parser:
    parser = tool_parser(name_program(f"checkpoint {command}"), text)
    parser.add_argument("path", type=Path, help="run folder, or one of its step_* folders")
    return parser


def _list(argv: list[str]) -> int:
    args = _parser("list", "the checkpoints of a run, newest first").parse_args(argv)
    print(f"{'checkpoint':<16}{'MB':>10}{'ranks':>7}{'val loss':>10}")
    damaged = 0
    # One damaged checkpoint does not hide the others.
    for path in find_all(args.path):
        try:
            size, meta = peek(path)
        except CheckpointError as error:
            damaged += 1
            print(f"{path.name:<16}  {error}")
            continue
        loss = meta.get("val_loss")
        loss_text = "" if loss is None else f"{loss:.4f}"
        print(f"{path.name:<16}{size / 1e6:>10.2f}{meta['world_size']:>7}{loss_text:>10}")
    return 1 if damaged else 0


def _verify(argv: list[str]) -> int:
    text = "read every byte of every checkpoint, and compare the checksums"
    args = _parser("verify", text).parse_args(argv)
    damaged = 0
    for path in find_all(args.path):
        try:
            load(path)
            print(f"{path.name}  ok")
        except CheckpointError as error:
            damaged += 1
            print(f"{path.name}  DAMAGED: {error}")
    if damaged:
        print(f"FAILED  {damaged} damaged; a resume uses the newest valid one")
    return 1 if damaged else 0


def _newest(path: Path) -> Path:
    """Return `path`, or the newest valid checkpoint of a run. Raises CheckpointError."""
    # A single checkpoint is used as it is; of a run, damaged ones are skipped.
    paths = find_all(path)
    if len(paths) == 1:
        return paths[0]
    newest, notes = newest_valid(paths[0].parent)
    if newest is None:
        raise CheckpointError(f"no checkpoint of {path} is valid: {'; '.join(notes)}")
    return newest.path


def _show(argv: list[str]) -> int:
    parser = _parser("show", "show the newest valid checkpoint, or the given one")
    parser.add_argument("--json", action="store_true", help="print only the metadata, as JSON")
    args = parser.parse_args(argv)
    path = _newest(args.path)
    state = load(path)
    if args.json:
        print(json.dumps(state.meta, indent=1))
        return 0
    print(f"{path}\n{'step':<14}{state.meta['step']}")
    for key in (
        "samples_seen",
        "world_size",
        "attempt",
        "val_loss",
        "best_val_loss",
        "model_shape",
    ):
        print(f"{key:<14}{state.meta.get(key)}")
    print(f"\nmodel: {_count_numbers(state.model)}")
    for name, tensor in state.model.items():
        shape = "×".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        print(f"  {name:<40}{shape:>14}  {dtype}")
    print(f"\noptimizer: {_count_numbers(state.optimizer)}")
    return 0


def _count_numbers(tensors: dict[str, Tensor]) -> str:
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return f"{len(tensors)} tensors, {numbers / 1e6:.2f} M numbers"


def _export(argv: list[str]) -> int:
    parser = _parser("export", "write the model of the newest valid checkpoint")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FILE|FOLDER",
        help="what to write; not overwritten; FILE.pt without --format: written by torch.save",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="huggingface (a folder for transformers' GPT2LMHeadModel) | nanogpt (its ckpt.pt, weights "
        "only) | safetensors | torch [by the name of FILE]",
    )
    args = parser.parse_args(argv)
    # Before the checkpoint is read, which may take minutes.
    kind = format_of(args.format, args.out)
    if args.out.exists():
        raise ConfigError(f"{args.out} already exists; give --out another name")
    if not args.out.parent.is_dir():
        raise ConfigError(
            f"{args.out.parent} is not a folder; create it, or give --out another path"
        )
    path = _newest(args.path)
    state = load(path)
    with writing(args.out, "give --out another path"):
        written = write_model(state, kind, args.out)
    files = [args.out]
    if args.out.is_dir():
        files = sorted(args.out.iterdir())
    size = sum(file.stat().st_size for file in files)
    print(f"{args.out}  step {state.meta['step']}, {written.tensors} tensors, {size / 1e6:.2f} MB")
    for note in written.notes:
        print(f"note  {note}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
