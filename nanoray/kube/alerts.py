"""`nanoray alerts > nanoray-alerts.yaml`: the alerts as a rule file, for a Prometheus by itself.

With Prometheus' operator, apply kuberay/components/monitoring instead, which has the same alerts.
docs/alerts.md explains each.
"""

from __future__ import annotations

from textwrap import dedent

from nanoray.cli import Parser, exit_code_of, name_program, tool_parser
from nanoray.kube.render import KUBE_DIR

MANIFEST = KUBE_DIR / "components" / "monitoring" / "alerts.yaml"


def rule_file() -> str:
    """Return the rules as YAML: the content of the manifest's `spec:`, with its comments."""
    # As text, because parsing the YAML would lose the comments. `spec:` is the manifest's last key.
    _, _, spec = MANIFEST.read_text(encoding="utf-8").partition("\nspec:\n")
    return dedent(spec)


def make_parser() -> Parser:
    """Return the parser of `nanoray alerts`."""
    return tool_parser(name_program("alerts"), __doc__)


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray alerts` and return the exit code."""
    return exit_code_of(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    make_parser().parse_args(argv)
    print(rule_file(), end="")


if __name__ == "__main__":
    raise SystemExit(main())
