"""`nanoray checkpoint list|verify|export|upload|import`: the checkpoints of a run.

list     step, size, validation loss of each checkpoint of a run; checks sizes and manifest only
verify   read every byte and compare the checksums; exit 1 if one is damaged
export   the model alone, as load_state_dict takes it: FILE.safetensors, with the model's shape in
         its header, or FILE.pt (torch.save), which also holds extra states; for other tools
         --format huggingface (a folder for transformers)
upload   send them with the run's records to object storage: s3://, gs://, file://
import   make a file that a run can begin with of a GPT-2 of Hugging Face or nanoGPT
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanoray.checkpoint.export import FORMATS, write_model
from nanoray.checkpoint.files import MANIFEST, STEP_NAME, find_all, load, peek
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.cli import (
    RUNS,
    Parser,
    find_run_folder,
    name_program,
    run_subcommand,
    tool_parser,
    writing,
)
from nanoray.cli import upload as upload
from nanoray.cli import weights as import_weights
from nanoray.errors import CheckpointError, ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    commands = {
        "list": _list,
        "verify": _verify,
        "export": _export,
        "upload": upload.main,
        "import": import_weights.main,
    }
    return run_subcommand(commands, argv, __doc__)


def _parser(command: str, text: str) -> Parser:
    parser = tool_parser(name_program(f"checkpoint {command}"), text)
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=RUNS,
        help="folder of a run, or of several: the newest of them; or one of its step_* folders [runs]",
    )
    return parser


def _checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints that a command is about, newest first.

    Raises ConfigError where no run is, and CheckpointError for a run without any.
    """
    is_checkpoint = (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.name)
    if not is_checkpoint and not (path / "checkpoints").is_dir() and path.name != "checkpoints":
        path = find_run_folder(path)
    return find_all(path)


def _list(argv: list[str]) -> int:
    args = _parser("list", "the checkpoints of a run, newest first").parse_args(argv)
    paths = _checkpoints_of(args.path)
    print(f"{'checkpoint':<16}{'MB':>10}{'ranks':>7}{'val loss':>10}")
    damaged = 0
    # One damaged checkpoint does not hide the others.
    for path in paths:
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
    for path in _checkpoints_of(args.path):
        try:
            load(path)
            print(f"{path.name}  ok")
        except CheckpointError as error:
            damaged += 1
            print(f"{path.name}  DAMAGED: {error}")
    if damaged:
        print(f"FAILED  {damaged} damaged; a resume uses the newest valid one")
    return 1 if damaged else 0


def load_newest(path: Path) -> tuple[Path, StateDict]:
    """Load a checkpoint, or the newest valid one of a run, and return its folder with it.

    `path`: see `_checkpoints_of`. Prints a warning for each damaged checkpoint that is newer. Raises
    CheckpointError.
    """
    paths = _checkpoints_of(path)
    # A single checkpoint is used as it is; of a run, damaged ones are skipped.
    if len(paths) == 1:
        return paths[0], load(paths[0])
    newest, notes = newest_valid(paths[0].parent)
    if newest is None:
        raise CheckpointError(f"no checkpoint of {path} is valid: {'; '.join(notes)}")
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    return newest.path, newest.state


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
        help="huggingface (a folder for transformers' GPT2LMHeadModel) | safetensors | torch [by the "
        "name of FILE]",
    )
    args = parser.parse_args(argv)
    # Before the checkpoint is read, which may take minutes.
    kind = args.format or ("torch" if args.out.suffix in (".pt", ".pth") else "safetensors")
    if args.out.exists():
        raise ConfigError(f"{args.out} already exists; give --out another name")
    if not args.out.parent.is_dir():
        raise ConfigError(
            f"{args.out.parent} is not a folder; create it, or give --out another path"
        )
    _, state = load_newest(args.path)
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
