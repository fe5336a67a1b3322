"""A hook of mkdocs: links out of docs/, and links to folders, become links to the repository on the
web.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the relative links of a page."""

    def rewrite(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = normpath(join("docs", dirname(page.file.src_uri), target))
        if "://" in target or (path.startswith("docs/") and (ROOT / path).is_file()):
            return match[0]
        return f"]({config['repo_url']}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", rewrite, markdown)
