"""Make a page from a template. Templates extend page.html.j2 of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from nanoray import __version__


def render(template: Path, **values: Any) -> str:
    """Return a page as HTML with escaped values. Raises jinja2.UndefinedError for a missing one."""
    folders = [template.parent, Path(__file__).parent]  # the second has page.html.j2
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,  # an empty place on the page would go unnoticed
    )
    return environment.get_template(template.name).render(version=__version__, **values)
