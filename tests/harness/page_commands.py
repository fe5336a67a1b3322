"""The commands on the pages of the documentation: where they stand, and whether their programs know
their words and flags.

    commands(page)          in the blocks of a page, complete
    mentions(page)          in its sentences, often a part of one: `nanoray kube status`
    check_command(command)  complete ones of nanoray are parsed, and of `nanoray kube` a dry run is done;
                            what other programs know, they say themselves
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from nanoray.cli import parse_args
from nanoray.cli.catalog import COMMANDS
from nanoray.cli.opening import Opening
from nanoray.lab.tune.__main__ import with_recipe
from tests.harness.manifests import require_kubectl
from tests.harness.parsers import RUNS, find_parsers

ROOT = Path(__file__).resolve().parents[2]
# Commands that pages start as modules, `python -m nanoray.launch`. All others are `nanoray NAME`, but
# torchrun takes a module
MODULES = ("launch", "bench")
# What is checked. Words of a system that stand beside them, such as mkdir, are not.
PROGRAMS = r"make|nanoray(?= [a-z])|python3?|torchrun"
PATH = r"(?:\.venv/bin/)?"
BEFORE = r'(?:\$ |sudo (?:-E )?|export |[A-Z_]+="\$\(|[A-Z_]+=\S+ )*'
COMMAND = re.compile(rf"^{BEFORE}{PATH}(?:{PROGRAMS})(?: [^ ]|$)")
MENTION = re.compile(rf"^{PATH}(?:{PROGRAMS}) [-a-z./]")
NO_COMMANDS = ("python", "yaml", "json", "toml", "text")  # languages of blocks
ENDS = ("&&", "||", "|", ";", "&", "(", ")")
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
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets, f"no target {rest[0]}"


def check_python(words: list[str], complete: bool, modules: tuple[str, ...] = MODULES) -> None:
    """`python -m MODULE ...` and `python SCRIPT ...`; `modules`: which of nanoray's may stand there."""
    if words[0] == "-m":
        module, *rest = words[1:]
        first, _, command = module.partition(".")
        if first == "nanoray":
            assert not command or command in modules, "all other commands are `nanoray NAME`"
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
    if name == "kube" and "--" in rest and complete:
        check_dry_run_of_kube(rest)  # of a program, whose own flags are none of ours
        return
    if name == "kube" and "--" in rest:
        rest = rest[: rest.index("--")]
    if not complete:
        check_flags(rest, options_of_nanoray(name, rest), known_by="nanoray")
    elif name in RUNS and rest[:1] != ["mig"]:
        check_flags_of_a_run(rest)
    else:
        found = find_parsers(name)
        subcommand, after = split_subcommand(rest, found)
        if subcommand in found:
            parsers, rest = found[subcommand], after
        else:
            assert "" in found, f"nanoray {name} has no {subcommand}"
            parsers = found[""]
        _, of_runs = parsers[0].parse_known_args(rest)
        assert not of_runs or len(parsers) > 1, f"not known: {' '.join(of_runs)}"
        if name == "tune":  # its first word may name the recipe
            of_runs = with_recipe(of_runs)
        check_flags_of_a_run(of_runs)
        if words[:2] in (["kube", "render"], ["kube", "submit"]):
            check_dry_run_of_kube(words[1:])


def check_dry_run_of_kube(words: list[str]) -> None:
    """Render, or submit as a dry run."""
    require_kubectl()
    command, *flags = words
    dry = ["--dry_run"] if command == "submit" else []
    assert importlib.import_module(COMMANDS["kube"].module).main([command, *dry, *flags]) == 0


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
    if words and not words[0].startswith("-"):
        subcommand, _ = split_subcommand(words, found)
        assert subcommand in found or "" in found, f"nanoray {name} has no {subcommand}"
        word = subcommand if subcommand in found else ""
        found = {word: found[word]}
    actions = [
        action for parsers in found.values() for parser in parsers for action in parser._actions
    ]
    return {option for action in actions for option in action.option_strings}


def check_flags(words: list[str], known: set[str], known_by: str) -> None:
    """Assert that each flag among the words is one of these."""
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
    assert flags <= known, f"{known_by} does not know {', '.join(sorted(flags - known))}"


def check_torchrun(words: list[str], complete: bool) -> None:
    """The command behind torchrun's own flags, which torchrun itself refuses."""
    if "-m" in words and complete:
        check_python(words[words.index("-m") :], complete, (*MODULES, "train"))
