"""`--help`: one screen of what people use; `--help all`, a group or a flag prints more.

The screen is a text, in which {prog} stands for the program. That of `train` and `launch` is here, so
that it can be printed without importing torch.
"""

from __future__ import annotations

from nanoray.cli.parsers import COMMAND_FLAGS, GROUPS, build_parser, flag_names
from nanoray.config import field_extra, refuse_unknown_key

# What most runs are started with, below the text of each command that takes the flags of a run
OF_A_RUN = f"""
recipe
  --preset NAME            tiny, shakespeare-cpu, shakespeare-char, gpt2-124m
  --config FILE            YAML; its keys are the flags' names, and flags win
  --schema                 print a JSON schema of such files, for an editor
  --dataset NAME|PATH      shakespeare, a text file, or a folder of tokens
  --init_from PATH         weights to begin with, of `nanoray checkpoint import`
  --n_layer N              transformer blocks; --n_head N heads, --n_embd N wide
  --block_size N           context length in tokens
  --dropout P              dropout probability while training

training
  --max_steps N            optimizer steps; or --num_epochs N
  --global_batch_size N    sequences of a step, over all ranks
  --micro_batch_size N     of a rank at a time; auto = the fastest that fits
  --lr X                   peak learning rate; --warmup_steps N before it
  --optimizer NAME         adamw, sgd or muon
  --seed N                 of weights, the order of samples and dropout

devices
  --workers N              ranks [every GPU or MIG slice, else 2 on CPU]
  --device NAME            cuda, mig, cpu or auto
  --precision NAME         auto, fp32, tf32, bf16, fp16, fp8, ...
  --compile                torch.compile: a slower start, faster steps on GPUs
  --dp_mode NAME           ddp, zero1, zero2, fsdp; also --tp N and --pp N

results
  -o, --out_dir DIR        parent of the run's folder [runs]
  --resume auto|PATH       continue a run, bit for bit
  --eval_every N           steps between evaluations
  --checkpoint_every N     steps between checkpoints
  --track NAME             report to a tracker: wandb, mlflow
  --dry_run                print what would run and where, start nothing

{{prog}} --help all, --help GROUP, --help FLAG
prints every flag, one, or those of a group:
{", ".join(GROUPS)}.
docs/flags.md has them, too, with what does not go together.
"""
TRAIN = """usage: {prog} [flags]

Train in this process; under torchrun, srun or mpirun, as one rank of many. No
Ray.

  {prog} --preset tiny
      seconds long: to see it work
  {prog} --dataset my.txt --max_steps 500 --lr 2e-3
      on your own text
  torchrun --nproc-per-node 2 -m nanoray.train --preset shakespeare-char
      on two ranks
"""
LAUNCH = """usage: {prog} [flags]

Train on Ray: one actor per GPU, MIG slice or CPU share.

  {prog} --workers 2
      Shakespeare on two ranks of this machine
  {prog} --preset gpt2-124m --dry_run --world_size 8
      what eight ranks would do: layout, batch and memory, without them
  {prog} --resume auto --ray_address HOST:PORT
      go on with the newest run, on a cluster
"""
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


def format_help(topic: str, prog: str, page: str) -> str:
    """Return the help of a topic: all flags, a group or one flag; "" is the command's own page.

    Raises ConfigError for a topic that is none.
    """
    if topic:
        return build_parser(prog, only=_flags_of(topic)).format_help()
    return f"{page}{OF_A_RUN}".replace("{prog}", prog)


def _flags_of(topic: str) -> list[str]:
    """Return the flags that a topic names. Raises ConfigError for a topic that is none."""
    word = topic.lstrip("-").replace("-", "_")
    groups = dict.fromkeys(COMMAND_FLAGS, "command")
    groups |= {key: field_extra(key)["group"] for key in flag_names()}
    flags = [key for key, group in groups.items() if word in ("all", group, key)]
    if not flags:
        refuse_unknown_key(f"--{word}", groups)
    return flags
