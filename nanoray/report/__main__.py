"""`nanoray report RUN [RUN ...]`: one HTML page about a run, or about several beside each other."""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path

from markupsafe import Markup

from nanoray.atomic import replace_text
from nanoray.cli import Parser, exit_code_of, name_program, tool_parser, writing
from nanoray.report.charts import COLOURS, charts, drawn_memory, layer_charts
from nanoray.report.gather import Run, facts, read_run, settings
from nanoray.report.html import render
from nanoray.report.memory import COLUMNS
from nanoray.trace.ledger import MEANINGS, USEFUL
from nanoray.trace.timeline import draw, newest_window

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
    _write(output, args.run)


def _write(output: Path, folders: list[Path]) -> None:
    html = page([read_run(folder) for folder in folders])
    with writing(output, "give another --output"):
        replace_text(output, html)
    print(output)


def page(runs: list[Run]) -> str:
    """Return the page as HTML. Texts of runs are escaped; it loads nothing and runs no script."""
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    return render(
        TEMPLATE,
        title=title,
        runs=runs,
        facts=[facts(run) for run in runs],
        colours=COLOURS,
        charts=_safe(charts(runs)),
        faulty=any(run.faults for run in runs),
        meanings=MEANINGS,
        useful=USEFUL,
        timelines=[(run.name, _timeline(run)) for run in runs if run.traced],
        layers=[(run, _safe(layer_charts(run.layers))) for run in runs if run.layers],
        formats=[(run, _safe(layer_charts(run.precision))) for run in runs if run.precision],
        memory=[(run, drawn_memory(run.memory)) for run in runs if run.memory],
        columns=COLUMNS,
        samples=[(run.name, run.summary["sample"]) for run in runs if run.summary.get("sample")],
        settings=settings(runs),
    )


def _safe(titled_charts: list[tuple[str, str]]) -> list[tuple[str, Markup]]:
    """Mark the SVGs as HTML that is not escaped. Matplotlib has escaped the names inside them."""
    return [(title, Markup(svg)) for title, svg in titled_charts]


def _timeline(run: Run) -> str:
    """Return the picture of the newest traced steps, as base64 of an SVG."""
    # `draw` writes a file, whose ending decides the format.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.svg")
        draw(newest_window(run.traced), path)
        return base64.b64encode(path.read_bytes()).decode()


if __name__ == "__main__":
    raise SystemExit(main())
