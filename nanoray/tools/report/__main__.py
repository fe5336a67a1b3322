"""`nanoray report RUN [RUN ...]`: one HTML page about a run, or about several beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from nanoray.base.atomic import replace_text
from nanoray.cli import Parser, exit_code_of, name_program, tool_parser, writing
from nanoray.tools.report.charts import COLOURS, charts
from nanoray.tools.report.command import typed_command
from nanoray.tools.report.gather import RunFiles, read_run, settings, shown_facts
from nanoray.tools.report.html import render

TEMPLATE = Path(__file__).with_name("page.html.j2")


def make_parser() -> Parser:
    """Return the parser of `nanoray report` and `nanoray compare`."""
    parser = tool_parser(name_program("report"), "Write an HTML page about runs.")
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run; several are compared")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write [RUN/report.html; of several: compare.html here]",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray report` and return the exit code."""
    return exit_code_of(lambda: _run(make_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    output = args.output
    if output is None:
        # A comparison belongs to no run's folder.
        output = Path("compare.html") if len(args.run) > 1 else args.run[0] / "report.html"
    html = page([read_run(folder) for folder in args.run])
    with writing(output, "give another --output"):
        replace_text(output, html)
    print(output)


def page(runs: list[RunFiles]) -> str:
    """Return the page as HTML. Texts of runs are escaped; it loads nothing and runs no script."""
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    return render(
        TEMPLATE,
        title=title,
        runs=runs,
        facts=shown_facts(runs),
        colours=COLOURS,
        charts=charts(runs),
        commands=[(run, typed_command(run.spec)) for run in runs],
        settings=settings(runs),
    )


if __name__ == "__main__":
    raise SystemExit(main())
