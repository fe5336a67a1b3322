"""SECURITY.md's promises that have no better place."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoray.config import load_config
from nanoray.errors import ConfigError
from nanoray.parallel.rendezvous import Rendezvous
from tests.harness.commands import run
from tests.harness.parsing import parse
from tests.harness.ranks import make_spec

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "nanoray").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
DANGEROUS = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle"),
    *(
        "torch.load",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "yaml.load_all",
        "os.system",
        "numpy.load",
    ),
}


def dangerous_in(tree: ast.AST) -> Iterator[str]:
    """Yield what could run what it reads: pickle, unsafe YAML, a shell, eval of text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from DANGEROUS & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from DANGEROUS & {node.module}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = [ast.unparse(keyword) for keyword in node.keywords]
            is_safe = name == "torch.load" and "weights_only=True" in words
            if name in DANGEROUS | {"eval", "exec", "compile"} and not is_safe:
                yield f"{name} in line {node.lineno}"
            if any(keyword.arg == "shell" for keyword in node.keywords):
                yield f"a shell in line {node.lineno}"


# A rank runs the text of the user's script: sent through Ray beside the function, or read from its file.
RUN_THE_SCRIPT = (
    "nanoray/launch/recovery/pickled_script.py",
    "nanoray/launch/program/fork_server.py",
)


def test_nothing_is_read_that_could_run() -> None:
    for path in SOURCES:
        found = list(dangerous_in(parse(path.read_text(encoding="utf-8"))))
        name = str(path.relative_to(ROOT))
        if name in RUN_THE_SCRIPT:
            assert [each.split()[0] for each in found] == ["exec", "compile"]
        else:
            assert found == [], name


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", "a b", "", "x\n"])
def test_a_name_cannot_leave_the_run_root(name: str) -> None:
    with pytest.raises(ConfigError, match="name = "):
        load_config(None, "tiny", {"name": name})


def test_run_folders_are_private(text: Path, tmp_path: Path) -> None:
    assert make_spec(text, tmp_path / "runs").folder.stat().st_mode & 0o777 == 0o700


def test_secrets_of_the_environment_and_of_the_rendezvous_stay_out_of_files(
    text: Path, tmp_path: Path
) -> None:
    """A proxy's password, Ray's token, and what keeps strangers out of the store: in no log, dump
    or metric.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {
        "HTTPS_PROXY": "http://me:proxypassword@127.0.0.1:1",
        "RAY_AUTH_TOKEN": "raytokenraytokenraytoken",
    }
    env |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = ["nanoray.train", "--preset", "tiny", "--max_steps", "2", "--warmup_steps", "1"]
    command += [
        "--dataset",
        str(text),
        "--data_dir",
        str(tmp_path / "cache"),
        "--out_dir",
        str(tmp_path / "runs"),
    ]
    done = run(*command, env=env)
    assert done.returncode == 0, done.stderr
    told = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    told[Path("output")] = (done.stdout + done.stderr).encode()
    assert any(b"attempt 0, pid" in content for content in told.values()), "the logs are among them"
    for secret in (b"proxypassword", b"raytokenraytoken"):
        assert not [path for path, content in told.items() if secret in content]
    assert "storesecret" not in repr(Rendezvous(secret="storesecret")), (
        "the logs say how ranks meet"
    )


def test_the_tests_that_security_md_names_are_there() -> None:
    for name in re.findall(r"`(test_\w+\.py)`", (ROOT / "SECURITY.md").read_text()):
        assert [*(ROOT / "tests").rglob(name)], name
