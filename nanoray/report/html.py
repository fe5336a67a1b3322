"""Make a page from a template. Templates extend page.html.j2 of this folder for its head, style and
footer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from nanoray import __version__


def render(template: Path, **values: Any) -> str:
    """Return a page as HTML. Values are escaped, and a name that the template lacks a value for is
    an error.
    """
    folders = [template.parent, Path(__file__).parent]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template.name).render(version=__version__, **values)
