"""`--help`: one screen of what people use; `--help all`, a group or a flag prints more."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from nanoray.cli.parsers import COMMAND_FLAGS, GROUPS, build_parser, flag_names
from nanoray.config import field_extra, refuse_unknown_key

WIDTH = 80  # columns of a screen

Flags = tuple[tuple[str, str], ...]  # a flag with its metavar, and what it is

# What most runs are started with. docs/flags.md has all flags
OF_A_RUN: tuple[tuple[str, Flags], ...] = (
    (
        "recipe",
        (
            ("--preset NAME", "tiny, shakespeare-cpu, shakespeare-char, gpt2-124m"),
            ("--config FILE", "YAML; its keys are the flags' names, and flags win"),
            ("--schema", "print a JSON schema of such files, for an editor"),
            ("--dataset NAME|PATH", "shakespeare, a text file, or a folder of tokens"),
            ("--init_from PATH", "weights to begin with, of `nanoray checkpoint import`"),
            ("--n_layer N", "transformer blocks; --n_head N heads, --n_embd N wide"),
            ("--block_size N", "context length in tokens"),
            ("--dropout P", "dropout probability while training"),
        ),
    ),
    (
        "training",
        (
            ("--max_steps N", "optimizer steps; or --num_epochs N"),
            ("--global_batch_size N", "sequences of a step, over all ranks"),
            ("--micro_batch_size N", "of a rank at a time; auto = the fastest that fits"),
            ("--lr X", "peak learning rate; --warmup_steps N before it"),
            ("--optimizer NAME", "adamw, sgd or muon"),
            ("--seed N", "of weights, the order of samples and dropout"),
        ),
    ),
    (
        "devices",
        (
            ("--workers N", "ranks [every GPU or MIG slice, else 2 on CPU]"),
            ("--device NAME", "cuda, mig, cpu or auto"),
            ("--precision NAME", "auto, fp32, tf32, bf16, fp16, fp8, ..."),
            ("--compile", "torch.compile: a slower start, faster steps on GPUs"),
            ("--dp_mode NAME", "ddp, zero1, zero2, fsdp; also --tp N and --pp N"),
        ),
    ),
    (
        "results",
        (
            ("-o, --out_dir DIR", "parent of the run's folder [runs]"),
            ("--resume auto|PATH", "continue a run, bit for bit"),
            ("--eval_every N", "steps between evaluations"),
            ("--checkpoint_every N", "steps between checkpoints"),
            ("--track NAME", "report to a tracker: wandb, mlflow"),
            ("--dry_run", "print what would run and where, start nothing"),
        ),
    ),
)


@dataclass(frozen=True)
class Page:
    """What `--help` of a command prints."""

    about: str
    examples: Flags = ()  # a command line, where {prog} is the program, and what it does
    sections: tuple[tuple[str, Flags], ...] = OF_A_RUN
    usage: str = "[flags]"
    more: str = ""  # in place of the lines about `--help all`


# Here, so that they can be printed without importing torch
TRAIN = Page(
    "Train in this process; under torchrun, srun or mpirun, as one rank of many. No Ray.",
    (
        ("{prog} --preset tiny", "seconds long: to see it work"),
        ("{prog} --dataset my.txt --max_steps 500 --lr 2e-3", "on your own text"),
        ("torchrun --nproc-per-node 2 -m nanoray.train --preset shakespeare-char", "on two ranks"),
    ),
)
LAUNCH = Page(
    "Train on Ray: one actor per GPU, MIG slice or CPU share.",
    (
        ("{prog} --workers 2", "Shakespeare on two ranks of this machine"),
        (
            "{prog} --preset gpt2-124m --dry_run --world_size 8",
            "what eight ranks would do: groups, bytes and memory, without them",
        ),
        ("{prog} --resume auto --ray_address HOST:PORT", "go on with the newest run, on a cluster"),
    ),
)
PAGES = {"train": TRAIN, "launch": LAUNCH}


def asked_for(words: list[str]) -> str | None:
    """Return the topic after --help on a command line, "" for none; None without --help."""
    for index, word in enumerate(words):
        if word.startswith("--help="):
            return word.removeprefix("--help=")
        if word not in ("-h", "--help"):
            continue
        following = words[index + 1 : index + 2]
        if following and not following[0].startswith("-"):
            return following[0]
        return ""
    return None


def format_help(topic: str, prog: str, page: Page) -> str:
    """Return the help on a topic: "" for a screen, all, a group, or a flag. Raises ConfigError."""
    if not topic:
        return format_page(prog, page)
    parser = build_parser(prog, page.about, only=_flags_of(topic))
    return parser.format_help()


def format_page(prog: str, page: Page) -> str:
    """Return a command's page."""
    lines = [f"usage: {prog} {page.usage}", "", *textwrap.wrap(page.about, WIDTH)]
    if page.examples:
        lines.append("")
    for command, meaning in page.examples:
        lines.append(f"  {command.format(prog=prog)}")
        lines.append(f"      {meaning}")

    for title, flags in page.sections:
        lines += ["", title]
        for flag, meaning in flags:
            lines += _rows(flag, meaning)

    more = page.more or (
        f"{prog} --help all, --help GROUP, --help FLAG: every flag, those of a group "
        f"({', '.join(GROUPS)}), or one. docs/flags.md has them, too, with what does not go "
        "together, and the names that other programs have for them."
    )
    lines += ["", *textwrap.wrap(more, WIDTH)]
    return "\n".join(lines) + "\n"


def _rows(flag: str, meaning: str) -> list[str]:
    """Return a flag and what it is, in two columns."""
    wide = 24
    texts = textwrap.wrap(meaning, WIDTH - wide - 3)
    rows = [f"  {flag:<{wide}} {texts[0]}"]
    for text in texts[1:]:
        rows.append(f"  {'':<{wide}} {text}")
    return rows


def _flags_of(topic: str) -> list[str]:
    """Return the flags that a topic names. Raises ConfigError for a topic that is none."""
    word = topic.lstrip("-").replace("-", "_")
    groups = dict.fromkeys(COMMAND_FLAGS, "command")
    groups |= {key: field_extra(key)["group"] for key in flag_names()}
    flags = [key for key, group in groups.items() if word in ("all", group, key)]
    if not flags:
        refuse_unknown_key(f"--{word}", groups)
    return flags
