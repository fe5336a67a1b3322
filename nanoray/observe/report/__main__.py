"""`nanoray report [RUN]`: one HTML page about a run.

nanoray report compare RUN RUN ...   one page about several, beside each other
nanoray report ledger [RUN]          where the time went: compute, communication, recovery, ...
nanoray report timeline [RUN]        draw traced steps: phases and collectives of all ranks
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from nanoray import __version__
from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    run_subcommand,
    tool_parser,
    writing,
)
from nanoray.machine.atomic import replace_text
from nanoray.observe.report.charts import COLOURS, loss_chart, small_charts
from nanoray.observe.report.command import typed_command
from nanoray.observe.report.figures import headlines, known_facts
from nanoray.observe.report.gather import RunFiles, read_run, settings
from nanoray.observe.trace import __main__ as timeline
from nanoray.observe.trace import accounts

TEMPLATE = Path(__file__).with_name("page.html.j2")


def make_parser() -> Parser:
    """Return the parser of `nanoray report`."""
    parser = tool_parser(name_program("report"), __doc__)
    add_run(parser)
    _add_output(parser, "[RUN/report.html]")
    return parser


def make_comparison_parser() -> Parser:
    """Return the parser of `nanoray report compare`."""
    parser = tool_parser(name_program("report compare"), "One HTML page about several runs.")
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    _add_output(parser, "[compare.html]")
    return parser


def _add_output(parser: Parser, default: str) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"page to write {default}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray report` or one of its parts, and return the exit code."""
    parts = {"compare": compare, "ledger": accounts.main, "timeline": timeline.main}
    return run_subcommand(parts, argv, __doc__, otherwise=report)


def report(argv: list[str]) -> int:
    """Run `nanoray report [RUN]` and return the exit code."""

    def run() -> None:
        args = make_parser().parse_args(argv)
        folder = find_run_folder(args.run)
        _write([folder], args.output or folder / "report.html")

    return exit_code_of(run)


def compare(argv: list[str]) -> int:
    """Run `nanoray report compare RUN RUN ...` and return the exit code."""

    def run() -> None:
        args = make_comparison_parser().parse_args(argv)
        # It belongs to no run's folder
        _write([find_run_folder(path) for path in args.run], args.output or Path("compare.html"))

    return exit_code_of(run)


def _write(folders: list[Path], output: Path) -> None:
    """Write the page about some runs, and print its path."""
    html = page([read_run(folder) for folder in folders])
    with writing(output, "give another --output"):
        replace_text(output, html)
    print(output)


def page(runs: list[RunFiles]) -> str:
    """Return the page as HTML. Texts of runs are escaped; it loads nothing and runs no script.

    Of one run it begins with how that ended, its four figures, and its loss. Of several it begins
    with a table of their figures. What no run has is not on the page.
    """
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    figures = known_facts(runs)
    commands = [(run, typed_command(run.spec)) for run in runs]
    first_figures = headlines(figures[0]) if len(runs) == 1 else {}
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,  # an empty place on the page would go unnoticed
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        runs=runs,
        headlines=first_figures,
        figures=figures,
        labels=[label for label in figures[0] if label not in first_figures],
        colours=COLOURS,
        loss=loss_chart(runs),
        charts=small_charts(runs),
        commands=[(run, command) for run, command in commands if command],
        settings=settings(runs),
        version=__version__,
    )


if __name__ == "__main__":
    raise SystemExit(main())
