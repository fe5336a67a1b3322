"""`nanoray alerts > nanoray-alerts.yaml`: the alerts for a Prometheus without the operator, as a
rule file.

They are those of the PrometheusRule in kuberay/components/monitoring/alerts.yaml; docs/alerts.md
explains each.
"""

from __future__ import annotations

from textwrap import dedent

from nanoray.cli import exit_code_of, tool_parser
from nanoray.kube.render import KUBE_DIR

MANIFEST = KUBE_DIR / "components" / "monitoring" / "alerts.yaml"


def rule_file() -> str:
    """Return the rules as YAML: what is under `spec:` in the manifest, which is its last key."""
    return dedent(MANIFEST.read_text(encoding="utf-8").split("\nspec:\n")[1])


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray alerts` and return the exit code."""
    return exit_code_of(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    tool_parser("nanoray alerts", __doc__).parse_args(argv)
    print(rule_file(), end="")


if __name__ == "__main__":
    raise SystemExit(main())
