"""Completion scripts, tried in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from nanoray.cli import completion
from nanoray.cli.catalog import COMMANDS
from nanoray.cli.completion import SHELLS, find_parsers, values_of, whole_parser
from nanoray.cli.parsers import COMMAND_FLAGS, flag_names

# What bash does when a user presses Tab
TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p nanoray | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
$function nanoray "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    whole = whole_parser()
    paths = {}
    for shell in SHELLS:
        paths[shell] = folder / f"nanoray.{shell}"
        paths[shell].write_text(shtab.complete(whole, shell))
    return paths


CASES = [
    ("tr", {"train"}),
    ("train --n_", {"--n_layer", "--n_head", "--n_embd"}),
    ("launch --dp_mode z", {"zero1", "zero2"}),
    ("train --preset sh", {"shakespeare-char", "shakespeare-cpu", "shakespeare-fast"}),
    ("train --lr 1 --compile ", {"true", "false", "cuda_graphs"}),
    ("train --dry_run --world_size 8 --topology nv", {"nvlink-400g"}),
    ("inspect --js", {"--json"}),
    ("check --tokeni", {"--tokenizer"}),
    ("checkpoint ", {"list", "verify", "show", "export"}),
    ("kube render --ranks", {"--ranks_per_pod"}),
    ("kube render --sequence", {"--sequence_parallel"}),
    ("kube logs --f", {"--follow"}),
    ("bench ste", {"step"}),
    ("bench step --qui", {"--quick"}),
    ("completion ", {"bash", "zsh", "fish"}),
    ("train --help op", {"optim"}),
    ("report --out", {"--output"}),
]


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line for line, _ in CASES])
def test_bash_completes(scripts: dict[str, Path], line: str, words: set[str]) -> None:
    typed = ["nanoray", *line.split(" ")]
    done = subprocess.run(
        ["bash", "--norc", "-c", TAB, "tab", str(scripts["bash"]), *typed],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_of_its_shell(scripts: dict[str, Path], shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    command = [shell, "-n", str(scripts[shell])]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(scripts: dict[str, Path]) -> None:
    asked = "source $argv[1]; complete -C 'nanoray train --n_'; complete -C 'nanoray inspect --js'"
    command = ["fish", "--no-config", "-c", asked, str(scripts["fish"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == {
        *("--n_layer", "--n_head", "--n_embd"),
        "--json",
    }


def test_every_command_and_flag_is_in_the_scripts(scripts: dict[str, Path]) -> None:
    for path in scripts.values():
        text = path.read_text()
        assert all(name in text for name in (*COMMANDS, *flag_names(), *COMMAND_FLAGS))


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["powershell"]) == 2
    assert "shell = powershell is none of bash, zsh, fish" in capsys.readouterr().err
    assert list(find_parsers("mig")) == ["plan", "show"]
    assert values_of("device") == ["auto", "cuda", "mig", "cpu"]
    assert values_of("lr") == []
