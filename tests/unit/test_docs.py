"""The documentation: every link and anchor leads somewhere, generated pages are up to date."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from nanoray import cli, errors
from nanoray.cli import __main__ as page
from nanoray.errors import NanorayError
from tests.harness.foreign import gpt2_weights
from tests.harness.page_commands import check_command, commands, mentions

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
KUBERAY = ROOT / "kuberay" / "README.md"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    CONTRIBUTING,
    ROOT / "CHANGELOG.md",
    KUBERAY,
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


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture
def where_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands of the pages name, and no cluster."""
    (recipe,) = re.findall(r"^```yaml\n(# run\.yaml.*?)^```", text_of(KUBERAY), re.M | re.S)
    (tmp_path / "run.yaml").write_text(recipe)
    (tmp_path / "train.py").touch()
    gpt2_weights(tmp_path / "gpt2.safetensors", positions=256)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "command", dict.fromkeys(command for page in PAGES for command in commands(text_of(page)))
)
@pytest.mark.usefixtures("where_commands_work")
def test_a_command_of_a_page_has_what_it_names(command: str) -> None:
    """What trains runs for real in other tests."""
    check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_in_a_sentence_has_flags_that_exist(page: Path) -> None:
    for command in dict.fromkeys(mentions(text_of(page))):
        check_command(command, complete=False)


# Stand for any name
PLACEHOLDERS = {"parallel/xp.py", "cli/forecast/parallelisms/xp.py"}


def unknown_files(text: str, tracked: list[str]) -> list[str]:
    """Return the files of Python in code font that are no file of the repository, nor the end of one."""
    named = {name for name in re.findall(r"`([\w/]+/\w+\.py)`", text) if "NAME" not in name}
    return sorted(
        name
        for name in named - PLACEHOLDERS
        if not any(f"/{path}".endswith(f"/{name}") for path in tracked)
    )


def test_files_that_pages_name_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    tracked = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    found = {
        page.relative_to(ROOT).as_posix(): unknown
        for page in PAGES
        if (unknown := unknown_files(page.read_text(encoding="utf-8"), tracked))
    }
    assert found == {}
    assert unknown_files("`train/engine.py` `train/gone.py`", tracked) == ["train/gone.py"]


def test_generated_pages_are_up_to_date() -> None:
    for name, module in (("flags", page), ("errors", errors)):
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
    outside = runpy.run_path(str(DOCS / "site" / "build.py"))["OUTSIDE"]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages | set(outside.values())
