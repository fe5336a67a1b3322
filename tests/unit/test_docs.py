"""The documentation: every link and anchor leads somewhere, generated pages are up to date, the
site builds.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nanoray import cli, errors
from nanoray.errors import NanorayError
from tests.unit.test_readme import COMMAND, check_command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "kuberay" / "README.md",
]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = []
    for heading in re.findall(r"^#+ +(.*)$", text, re.M):
        name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        names.append(name + (f"-{names.count(name)}" if name in names else ""))
    return set(names)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        path = (page.parent / target) if target else page
        if "://" not in target and (not path.exists() or (anchor and anchor not in anchors(path))):
            wrong.append(f"{target}#{anchor}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[ok](#a-b-c) [ok](page.md) [no](none.md) [no](#a-b) [web](https://x.org/#y)\n"
    )
    assert broken(page) == ["none.md#", "#a-b"]


def commands(page: Path) -> list[str]:
    """The commands in the plain blocks of a page, without their comments."""
    text = re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    return [
        line.split("  #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if COMMAND.match(line)
    ]


# A drawing
OF_DOCS = dict.fromkeys(c for page in DOCS.rglob("*.md") for c in commands(page) if "──►" not in c)


@pytest.mark.parametrize("command", OF_DOCS)
def test_commands_of_the_pages_parse(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_command(command, tmp_path, monkeypatch)


def test_generated_pages_are_up_to_date() -> None:
    for name, module in (("flags", cli), ("errors", errors)):
        assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == module.to_markdown() + "\n", (
            "run: make docs"
        )


def test_every_error_and_exit_code_has_a_remedy() -> None:
    def all_of(kind: type[NanorayError]) -> set[type[NanorayError]]:
        return {kind}.union(*(all_of(sub) for sub in kind.__subclasses__()))

    known = {
        kind for kind in all_of(NanorayError) - {NanorayError} if kind.__module__ == errors.__name__
    }
    assert known == errors.REMEDIES.keys()
    assert {kind.exit_code for kind in known} <= errors.EXIT_CODES.keys()
    flags = set(cli.flag_names()) | {"dry_run"}
    for text in errors.REMEDIES.values():
        assert set(re.findall(r"--(\w+)", text)) <= flags


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[2]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert all((ROOT / hook).is_file() for hook in settings["hooks"])


@pytest.mark.skipif(
    not importlib.util.find_spec("mkdocs"),
    reason="mkdocs is not installed: pip install -e '.[docs]'",
)
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in DOCS.rglob("*.md"):
        name = (
            page.relative_to(DOCS)
            .with_suffix(".html")
            .as_posix()
            .replace("README.html", "index.html")
        )
        html = (tmp_path / name).read_text(encoding="utf-8")
        assert (
            re.findall(
                r"""<(?:script|img|link rel="(?:stylesheet|shortcut icon)")[^>]*(?:src|href)="https?:""",
                html,
            )
            == []
        )
        assert 'href="../README.md"' not in html
