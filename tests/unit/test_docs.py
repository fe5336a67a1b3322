"""The documentation: every link and anchor leads somewhere, generated pages are up to date."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from nanoray import cli, errors
from nanoray.cli import __main__ as page
from nanoray.errors import ConfigError, NanorayError
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


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[ok](#a-b-c) [ok](page.md) [no](none.md) [no](#a-b) [web](https://x.org/#y)\n"
    )
    assert broken(page) == ["none.md#", "#a-b"]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture
def where_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands of the pages name, and no cluster."""
    (recipe,) = re.findall(r"^```yaml\n(# run\.yaml.*?)^```", text_of(KUBERAY), re.M | re.S)
    (tmp_path / "run.yaml").write_text(recipe)
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


@pytest.mark.parametrize(
    "command",
    [
        "make trian",
        "nanoray reprot runs/RUN",
        "nanoray report runs/RUN --htm x.html",
        "nanoray data tokenise x",
        "nanoray kube submit --config run.yaml --cpu 2",
        "A=1 .venv/bin/python -m nanoray.bench step cpu --rownds 5 > out",
        "torchrun --nproc-per-nodes 2 -m nanoray.train",
        "torchrun --nproc-per-node 2 -m nanoray.train --wokers 2",
        "python -m nanoray.launch --workers 2 --pp 2 --grad_accum_steps 8",
        "ray job submit --workdir . -- python train.py",
        "ray job submit --working-dir . -- python -m nanoray.launch --wokers 2",
        "kubectl apply --serverside -k kuberay/overlays/cpu/job",
        "$ kubectl apply --server-side -k kuberay/overlays/cpu/jobs",
        'export A="$(kubectl -n nanoray get secret nanoray --output-format json | base64 -d)"',
        "helm install kuberay-operator kuberay/kuberay-operator --version 1.6.0",
        "sudo -E kuberay/scripts/install.sh cpus",
        "pip install 'nanoray[s4]'",
        "python examples/kill_a_rank.py",
        "python -m pytest -q tests/unit/test_none.py",
    ],
)
@pytest.mark.usefixtures("where_commands_work")
def test_a_wrong_command_is_found(command: str) -> None:
    assert commands(f"```\n{command}  # why\n```\n") == [command]
    with pytest.raises((AssertionError, ConfigError)):
        check_command(command)


def test_blocks_in_languages_do_not_hide_commands() -> None:
    page = "```yaml\na: 1\n```\n\n```\nmake test\nstep 1 | loss 2\n```\n`make docs` `make`, `a`\n"
    assert commands(page) == ["make test"]
    assert mentions(page) == ["make docs"]


# Stand for any name
PLACEHOLDERS = {"parallel/xp.py", "forecast/parallelisms/xp.py"}


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


def missing_names(recipe: str) -> list[str]:
    """Return the paths of a recipe that do not exist, and the names that none of its files has.

    Both stand in code font. A name is that of a class, function, field or dict.
    """
    fences = re.compile(r"^```\n(.*?)^```", re.M | re.S)
    in_text = set(re.findall(r"`([^`\n]+)`", fences.sub("", recipe)))
    in_commands = set(" ".join(fences.findall(recipe)).split())
    is_path = re.compile(r"(nanoray|tests|docs)/[\w/.-]*")
    paths = {word for word in in_text | in_commands if is_path.fullmatch(word)}
    missing = [path for path in paths if not (ROOT / path).exists()]

    # A section that names no file has words in code font that are no names of the code.
    sources = [ROOT / path for path in paths if path.endswith(".py") and path not in missing]
    if sources:
        known = {word for file in sources for word in re.findall(r"\w+", file.read_text("utf-8"))}
        names = [span for span in in_text if re.fullmatch(r"[A-Za-z_][\w.]*", span)]
        missing += [name for name in names if not set(name.split(".")) <= known]
    return sorted(missing)


RECIPES = re.split(r"^## ", CONTRIBUTING.read_text(encoding="utf-8"), flags=re.M)[1:]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.partition("\n")[0])
def test_a_recipe_names_files_and_names_that_exist(recipe: str) -> None:
    assert missing_names(recipe) == []


def test_a_name_that_is_gone_is_found_in_a_recipe() -> None:
    recipe = (
        "`TABLE` `GONE` `Conflict.problem` `nanoray/gone.py` in `nanoray/config/conflicts.py`\n"
    )
    assert missing_names(recipe) == ["GONE", "nanoray/gone.py"]


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


def own_addresses(text: str) -> list[str]:
    """Return the addresses that claim to be this project's: those that contain its name."""
    return [
        address
        for address in re.findall(r"\b(?:https?://|git@)[^\s\"'<>)\]}]+", text)
        if "nanoray" in address.lower() and "//127.0.0.1" not in address
    ]


def test_no_address_of_the_project_is_invented() -> None:
    """It is published at no address yet, so no file may name one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {address}" for address in own_addresses(text)]
    assert found == []


def test_the_top_of_the_repository_has_only_what_belongs_there() -> None:
    """A wheel or a log that somebody left beside them would reach every clone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    folders = {"nanoray", "examples", "kuberay", "docker", "docs", "tests", ".ci"}
    texts = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"}
    tools = {"Makefile", "pyproject.toml", "constraints.txt", "mkdocs.yml"}
    assert top - folders - texts - tools - {".gitignore", ".dockerignore"} == set()


def test_an_invented_address_is_found() -> None:
    host = "https://" + "example.org"
    text = f"[a]({host}/nanoray/x) [b]({host}/torch) <{host}/a/NanoRay> http://127.0.0.1:1/nanoray"
    assert own_addresses(text) == [f"{host}/nanoray/x", f"{host}/a/NanoRay"]
