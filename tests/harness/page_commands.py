"""The commands on the pages of the documentation: where they stand, and whether their programs know
their words and flags.

    commands(page)          in the blocks of a page, complete
    mentions(page)          in its sentences, often a part of one: `nanoray kube status`
    check_command(command)  each program is there and knows each flag; complete ones of nanoray are
                            parsed, and of `nanoray kube` and the scripts of kuberay/ a dry run is done
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import click

from nanoray.cli import parse_args
from nanoray.cli.catalog import COMMANDS
from nanoray.start.opening import Opening
from nanoray.tune.__main__ import with_recipe
from tests.harness.manifests import require_kubectl
from tests.harness.parsers import RUNS, find_parsers

ROOT = Path(__file__).resolve().parents[2]
# Commands that are also modules: `python -m nanoray.train`. All others are `nanoray NAME` alone
MODULES = ("train", "launch", "bench")
SCRIPTS = ROOT / "kuberay" / "scripts"
# What is checked. Words of a system that stand beside them, such as mkdir, are not.
OF_RAY = r"ray(?= (?:start|stop|status|job|drain-node)\b)"
PROGRAMS = (
    rf"make|nanoray(?= [a-z])|python3?|torchrun|{OF_RAY}|tensorboard|pip|kubectl|helm|sbatch|"
    r"kuberay/scripts/\S+\.sh"
)
PATH = r"(?:\.venv/bin/)?"
BEFORE = r'(?:\$ |sudo (?:-E )?|export |[A-Z_]+="\$\(|[A-Z_]+=\S+ )*'
COMMAND = re.compile(rf"^{BEFORE}{PATH}(?:{PROGRAMS})(?: [^ ]|$)")
MENTION = re.compile(rf"^{PATH}(?:{PROGRAMS}) [-a-z./]")
NO_COMMANDS = ("python", "yaml", "json", "toml", "text")  # languages of blocks
ENDS = ("&&", "||", "|", ";", "&", "(", ")")
# Commands of kubectl of several words, which have a help of their own: `auth can-i`
WORDS_OF_KUBECTL = {"auth": 2, "create": 3, "top": 2}
REDIRECTIONS = (">", ">>", "<", "2>&1", ">&")


def blocks(text: str) -> list[str]:
    """Return the blocks of a page that may have commands; a line that continues is one line."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [
        re.sub(r" *\\\n *", " ", block) for language, block in found if language not in NO_COMMANDS
    ]


def commands(text: str) -> list[str]:
    """Return the commands in the blocks of a page, without their comments and what they print."""
    return [
        line.split("  #")[0].strip()
        for block in blocks(text)
        for line in block.splitlines()
        # Two spaces: a column of a drawing or of an output
        if COMMAND.match(line) and not re.match(r"\S+  |.*──►", line)
    ]


def mentions(text: str) -> list[str]:
    """Return the commands in code font in the sentences of a page."""
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences))
    return [span.replace("\\|", "|") for span in spans if MENTION.match(span)]


def simple_commands(command: str) -> list[list[str]]:
    """Return the words of each command of a line, those of $(...) too."""
    inner = re.findall(r"\$\(([^()]+)\)", command)
    lexer = shlex.shlex(re.sub(r"\$\([^()]+\)", "X", command), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ENDS:
            found.append([])
        else:
            found[-1].append(word)
    lists = [_program_and_words(words) for words in found]
    return [words for words in lists if words] + [
        words for line in inner for words in simple_commands(line)
    ]


def _program_and_words(words: list[str]) -> list[str]:
    """Drop what stands before the program, and redirections."""
    while words and re.match(r"^(\$|sudo|-E|export|[A-Z_]+=.*)$", words[0]):
        words = words[1:]
    for i, word in enumerate(words):
        if word in REDIRECTIONS:
            return words[:i] + words[i + 2 :]
    return words


def check_command(command: str, complete: bool = True) -> None:
    """Raise AssertionError or ConfigError where a program does not know what it is given."""
    for words in simple_commands(command):
        check(words, complete)


def check(words: list[str], complete: bool) -> None:
    """Check a program and its words."""
    program = words[0].split("/")[-1]
    rest = words[1:]
    if program in ("python", "python3"):
        check_python(rest, complete)
    elif program == "nanoray":
        check_nanoray(rest, complete)
    elif program == "torchrun":
        check_torchrun(rest, complete)
    elif program == "ray":
        check_ray(rest, complete)
    elif program == "kubectl":
        check_kubectl(rest, complete)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets, f"no target {rest[0]}"
    elif program == "helm":
        check_helm(rest)
    elif program == "pip":
        check_pip(rest)
    elif program == "sbatch":
        check_sbatch(rest)
    elif words[0].startswith("kuberay/scripts/"):
        check_script(words)


def check_sbatch(words: list[str]) -> None:
    """A script of examples/, and the flags of a run behind it."""
    at = next((i for i, word in enumerate(words) if word.endswith(".sbatch")), None)
    if at is not None:
        assert (ROOT / words[at]).is_file(), f"no file {words[at]}"
        assert parse_args(words[at + 1 :], "x", "y").config


def check_python(words: list[str], complete: bool) -> None:
    """`python -m MODULE ...` and `python SCRIPT ...`."""
    if words[0] == "-m":
        module, *rest = words[1:]
        first, _, command = module.partition(".")
        if first == "nanoray":
            assert not command or command in MODULES, "all other commands are `nanoray NAME`"
            check_nanoray([command, *rest] if command else rest, complete)
            return
        assert importlib.util.find_spec(module), f"no module {module}"
        if module == "pytest":
            paths = [word for word in rest if word.startswith("tests/")]
            missing = [path for path in paths if not (ROOT / path.partition("::")[0]).exists()]
            assert not missing, f"no file {missing}"
    elif words[0].startswith("examples/"):
        assert (ROOT / words[0]).is_file(), f"no file {words[0]}"


def check_nanoray(words: list[str], complete: bool) -> None:
    """A command of nanoray: a complete one is parsed, of another one each flag exists."""
    name, *rest = words
    if name == "NAME":
        return
    assert name in COMMANDS, f"nanoray has no command {name}"
    if not complete:
        check_flags(rest, options_of_nanoray(name, rest), known_by="nanoray")
    elif name in RUNS:
        check_flags_of_a_run(rest)
    else:
        found = find_parsers(name)
        if "" not in found:
            subcommand, rest = split_subcommand(rest, found)
            assert subcommand in found, f"nanoray {name} has no {subcommand}"
            parsers = found[subcommand]
        else:
            parsers = found[""]
        _, of_runs = parsers[0].parse_known_args(rest)
        assert not of_runs or len(parsers) > 1, f"not known: {' '.join(of_runs)}"
        if name == "tune":  # its first word may name the recipe
            of_runs = with_recipe(of_runs)
        check_flags_of_a_run(of_runs)
        if words[:2] in (["kube", "render"], ["kube", "submit"]):
            require_kubectl()
            dry = [*words[1:], *(["--dry_run"] if words[1] == "submit" else [])]
            assert importlib.import_module(COMMANDS["kube"][0]).main(dry) == 0


def split_subcommand(words: list[str], known: Iterable[str]) -> tuple[str, list[str]]:
    """Return the subcommand of one or two words that a command line begins with, and the rest."""
    count = 2 if " ".join(words[:2]) in known else 1
    return " ".join(words[:count]), words[count:]


def check_flags_of_a_run(words: list[str]) -> None:
    """Parse them, without a file that another command has written into a run's folder.

    Ranks that are given must be able to share the batch.
    """
    if "--config" in words:
        at = words.index("--config")
        if words[at + 1].startswith("runs/"):
            words = [*words[:at], *words[at + 2 :]]
    loaded = parse_args(words, "x", "y")
    if loaded.config.workers != "auto":
        Opening(loaded, 0.0, script=check_command).require_batch(loaded.config.workers)


def options_of_nanoray(name: str, words: list[str]) -> set[str]:
    """Return the flags of a command, or of its subcommand if one stands there."""
    found = find_parsers(name)
    if "" not in found and words and not words[0].startswith("-"):
        subcommand, _ = split_subcommand(words, found)
        assert subcommand in found, f"nanoray {name} has no {subcommand}"
        found = {subcommand: found[subcommand]}
    actions = [
        action for parsers in found.values() for parser in parsers for action in parser._actions
    ]
    return {option for action in actions for option in action.option_strings}


def check_flags(words: list[str], known: set[str], known_by: str) -> None:
    """Assert that each flag among the words is one of these."""
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
    assert flags <= known, f"{known_by} does not know {', '.join(sorted(flags - known))}"


def check_torchrun(words: list[str], complete: bool) -> None:
    """torchrun's own flags, and the command behind them."""
    from torch.distributed.run import get_args_parser

    options = set(get_args_parser()._option_string_actions)
    own = next(
        (i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words)
    )
    check_flags(words[:own], options, "torchrun")
    if words[own : own + 2] == ["-m", "nanoray.train"] and complete:
        check_python(words[own:], complete)


def check_ray(words: list[str], complete: bool) -> None:
    """Ray's own flags, and the command of a job."""
    with warnings.catch_warnings():  # of the packages that Ray imports
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import cli

    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words:
        inner = command.get_command(context, words[0])
        assert inner, f"ray has no {words[0]}"
        command, words = inner, words[1:]
    if "--" in words:
        job = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
        check([word for word in job if word != "exec"], complete)
    parameters = [option for option in command.params if isinstance(option, click.Option)]
    known = {name for option in parameters for name in (*option.opts, *option.secondary_opts)}
    check_flags(words, known, "ray")


@cache
def help_of_kubectl(*words: str) -> str:
    require_kubectl()
    command = ["kubectl", *words] if words == ("options",) else ["kubectl", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"kubectl has no {' '.join(words)}"
    return done.stdout


def check_kubectl(words: list[str], complete: bool) -> None:
    """kubectl's flags, by its help, and the folder that it is given."""
    if "--" in words:  # what `exec` runs
        words = words[: words.index("--")]
    if words[:1] == ["-n"]:
        words = words[2:]
    if not words:
        return
    verb = words[: WORDS_OF_KUBECTL.get(words[0], 1)]
    text = help_of_kubectl(*verb) + help_of_kubectl("options")
    known = set(re.findall(r"^ +(--[\w-]+)", text, re.MULTILINE))
    known |= {
        name for pair in re.findall(r"^ +(-\w), (--[\w-]+)", text, re.MULTILINE) for name in pair
    }
    check_flags(words, known, "kubectl")
    if "-k" in words and "NAME" not in words[words.index("-k") + 1]:
        folder = words[words.index("-k") + 1]
        assert (ROOT / folder / "kustomization.yaml").is_file(), f"no {folder}"


def check_helm(words: list[str]) -> None:
    """The charts and their versions are those that the script of the same page installs."""
    script = (SCRIPTS / "install.sh").read_text() + (SCRIPTS / "lib.sh").read_text()
    for word in words:
        if word.count("/") == 1 and word.islower():
            assert word in script, f"{word} is no chart of install.sh"
    if "--version" in words:
        version = words[words.index("--version") + 1]
        assert re.search(rf"[=-]{re.escape(version)}\b", script), f"install.sh has not {version}"


def check_pip(words: list[str]) -> None:
    """The extras of nanoray that it installs exist."""
    text = (ROOT / "pyproject.toml").read_text()
    for word in words:
        for extra in re.findall(r"^(?:nanoray|\.)\[(\w+)\]$", word):
            assert re.search(rf"^{extra} = \[", text, re.MULTILINE), f"no extra {extra}"


def check_script(words: list[str]) -> None:
    """A script of kuberay/ says what it would do, and does nothing."""
    script = ROOT / words[0]
    assert script.is_file(), f"no file {words[0]}"
    command = ["bash", str(script), "--dry-run", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
