"""SECURITY.md's promises that have no better place."""

from __future__ import annotations

import ast
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoray import data
from nanoray.config import load_config
from nanoray.data import prepare
from nanoray.errors import ConfigError, DataError
from tests.ranks import make_spec

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [*sorted((ROOT / "nanoray").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
DANGEROUS = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "numpy.load"),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_read_that_could_run(path: Path) -> None:
    """No pickle, no unsafe YAML, no shell, no eval of text in what is shipped."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not DANGEROUS & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in DANGEROUS
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in DANGEROUS | {"eval", "exec", "compile"}, f"{name} in line {node.lineno}"
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not shell, f"a shell in line {node.lineno}"


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", "a b", "", "x\n"])
def test_a_name_cannot_leave_the_run_root(name: str) -> None:
    with pytest.raises(ConfigError, match="name = "):
        load_config(None, "tiny", {"name": name})


def test_run_folders_are_private(text: Path, tmp_path: Path) -> None:
    assert make_spec(text, tmp_path / "runs").folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("url", ["https://me:secret@host/input.txt", "http://token@host/x"])
def test_a_password_in_data_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, "tiny", {"dataset": "shakespeare", "data_url": url})
    assert "data_url holds a password" in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "token" not in str(refused.value)


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose answer never ends."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                pass

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_a_download_has_an_end(endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_BYTES", 1 << 20)
    config = load_config(None, "tiny", {"dataset": "shakespeare", "data_url": endless, "data_dir": str(tmp_path)})
    with pytest.raises(DataError, match="more than 1 MiB"):
        prepare(config)
    assert not list(tmp_path.rglob("*.txt"))


def test_the_tests_that_security_md_names_are_there() -> None:
    for name in re.findall(r"`(test_\w+\.py)`", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / "tests" / name).is_file(), name
