"""Build the website: `python docs/site/build.py` writes build/site.

The generator wants all pages in one folder, without a link that leaves it. So this script first
copies the documents to build/pages. Documents outside of docs/ get a page, and so does each file
and folder of the repository to which a page links. The site needs no network and no server.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from posixpath import basename, dirname, join, normpath, relpath

ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(__file__).parent

# Documents outside of docs/, and their pages.
OUTSIDE = {
    "README.md": "readme.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kuberay/README.md": "kubernetes.md",
}

# Files that a browser opens by itself. They are copied as they are.
COPIED = (".json", ".png", ".svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".js": "javascript"}

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
CELLS = re.compile(r"^\|.*\|$", re.MULTILINE)  # a row of a table
CODE = re.compile(r"`[^`\n]+`")
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)


def page_of(path: str) -> str:
    """Return the page, relative to the site's folder, that shows a path of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return join("source", path, "index.md")
    if path.endswith(COPIED):
        return join("source", path)
    return join("source", path + ".md")


class Pages:
    """The folder of pages while it is filled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[str] = []  # paths of the repository that need a page
        self._seen: set[str] = set()

    def write_all(self) -> None:
        """Write the page of every document, and of everything that they link to."""
        for path in sorted((ROOT / "docs").rglob("*")):
            if path.suffix in (".md", *COPIED):
                self._want(path.relative_to(ROOT).as_posix())
        for path in OUTSIDE:
            self._want(path)
        for asset in ASSETS.iterdir():
            if asset.suffix in (".css", ".js"):
                shutil.copy(asset, self._folder / asset.name)

        # A page that is written may link to files that no page has shown before.
        while self._waiting:
            path = self._waiting.pop()
            page = self._folder / page_of(path)
            page.parent.mkdir(parents=True, exist_ok=True)
            if path.endswith(COPIED):
                shutil.copy(ROOT / path, page)
            else:
                page.write_text(self._text(path), encoding="utf-8")

    def _want(self, path: str) -> None:
        if not (ROOT / path).exists():
            raise SystemExit(f"a page links to {path}, which does not exist")
        if path not in self._seen:
            self._seen.add(path)
            self._waiting.append(path)

    def _text(self, path: str) -> str:
        """Return the Markdown of the page that shows a path of the repository."""
        if path.endswith(".md"):
            return self._with_links_of_the_site(path)
        if (ROOT / path).is_dir():
            return _not_searched(self._listing(path))
        if path.endswith(".ipynb"):
            return _not_searched(_notebook(path))
        return _not_searched(_source(path))

    def _listing(self, folder: str) -> str:
        """Return a page that lists the files below a folder."""
        lines = [f"# {folder}/", ""]
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                file = path.relative_to(ROOT).as_posix()
                self._want(file)
                target = relpath(page_of(file), join("source", folder))
                lines.append(f"- [{relpath(file, folder)}]({target})")
        return "\n".join(lines) + "\n"

    def _with_links_of_the_site(self, path: str) -> str:
        """Return a document whose relative links lead to pages of the site."""
        here = page_of(path)

        def rewrite(match: re.Match[str]) -> str:
            target = match[1]
            anchor = match[2] or ""
            if "://" in target:
                return match[0]
            linked = normpath(join(dirname(path), target))
            self._want(linked)
            return f"]({relpath(page_of(linked), dirname(here) or '.')}{anchor})"

        # Code is left as it is: brackets before parentheses are no link there.
        text = (ROOT / path).read_text(encoding="utf-8")
        parts = []
        end = 0
        for fence in FENCE.finditer(text):
            parts.append(LINK.sub(rewrite, text[end : fence.start()]))
            parts.append(fence[0])
            end = fence.end()
        parts.append(LINK.sub(rewrite, text[end:]))
        parts = [CELLS.sub(_with_plain_pipes, part) for part in parts]

        # Markdown inside of HTML is read only where the HTML asks for it.
        return "".join(parts).replace("<details>", "<details markdown>")


def _with_plain_pipes(row: re.Match[str]) -> str:
    """Return a row of a table without backslashes before the pipes in its code.

    A forge needs them, and this site would show them.
    """
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _not_searched(text: str) -> str:
    """Return a page that search leaves out: code would hide the documents among its hits."""
    return f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n{text}"


def _source(path: str) -> str:
    """Return a page that shows a file as code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {basename(path)}\n\n`{path}`\n\n{_fenced(text, language)}"


def _notebook(path: str) -> str:
    """Return a page of a notebook's cells, without their outputs."""
    cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
    parts = [f"`{path}`\n"]
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(_fenced(text, "python"))
        else:
            # A notebook's relative links lead from its own folder; their text stays.
            parts.append(re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text) + "\n")
    return "\n".join(parts)


def _fenced(text: str, language: str) -> str:
    """Return text as a block of code, whose fence is longer than any inside it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def build(folder: Path) -> Path:
    """Build the site in a folder, and return the path of its first page. Raises SystemExit where that fails."""
    # A page that was removed would otherwise stay.
    pages = folder / "pages"
    for old in (pages, folder / "site"):
        shutil.rmtree(old, ignore_errors=True)
    pages.mkdir(parents=True)
    Pages(pages).write_all()

    # The generator takes folders below its configuration only.
    shutil.copy(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)

    # Its links begin at a server's root, which a file does not have.
    (folder / "site" / "404.html").unlink()
    return folder / "site" / "index.html"


def main() -> None:
    """Build the site in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Build the website of docs/.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where [build]")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
