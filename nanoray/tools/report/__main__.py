"""`nanoray report RUN [RUN ...]`: one HTML page about a run, or about several beside each other."""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from nanoray.base.atomic import replace_text
from nanoray.cli import Parser, exit_code_of, name_program, tool_parser, writing
from nanoray.errors import ConfigError, NanorayError
from nanoray.tools.report.charts import COLOURS, Drawing, charts, drawn_memory, layer_charts
from nanoray.tools.report.commands import Command, first_command, other_commands
from nanoray.tools.report.gather import RunFiles, facts, read_run, settings
from nanoray.tools.report.html import render
from nanoray.tools.report.memory import COLUMNS
from nanoray.trace.accounts import MEANINGS, USEFUL
from nanoray.trace.timeline import draw, newest_window

TEMPLATE = Path(__file__).with_name("page.html.j2")
SAMPLE_TOKENS = 120


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
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLE_TOKENS,
        help=f"tokens to write with each checkpoint; 0: none, without torch [{SAMPLE_TOKENS}]",
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
    _write(output, args.run, args.samples)


def _write(output: Path, folders: list[Path], sample_tokens: int) -> None:
    if sample_tokens < 0:
        raise ConfigError(f"samples = {sample_tokens}; give a number of tokens, or 0 for none")
    html = page([read_run(folder) for folder in folders], sample_tokens)
    with writing(output, "give another --output"):
        replace_text(output, html)
    print(output)


def page(runs: list[RunFiles], sample_tokens: int = 0) -> str:
    """Return the page as HTML. Texts of runs are escaped; it loads nothing and runs no script.

    `sample_tokens`: how many each checkpoint writes; 0 shows the runs' closing samples alone.
    """
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    return render(
        TEMPLATE,
        title=title,
        runs=runs,
        facts=[facts(run) for run in runs],
        colours=COLOURS,
        charts=[_safe(drawing) for drawing in charts(runs)],
        faulty=any(run.faults for run in runs),
        meanings=MEANINGS,
        useful=USEFUL,
        timelines=[(run.name, _timeline(run)) for run in runs if run.traced],
        layers=[(run, [_safe(d) for d in layer_charts(run.layers)]) for run in runs if run.layers],
        formats=[
            (run, [_safe(d) for d in layer_charts(run.precision)]) for run in runs if run.precision
        ],
        memory=[(run, drawn_memory(run.memory)) for run in runs if run.memory],
        columns=COLUMNS,
        samples=[(run, write_samples(run, sample_tokens)) for run in runs],
        settings=settings(runs),
        again=[_commands(run) for run in runs],
    )


def _commands(run: RunFiles) -> tuple[RunFiles, Command | None, list[Command]]:
    """Return the command that started a run, and others that start it again."""
    ranks = run.summary.get("world_size") or 1
    device = str(run.summary.get("device") or "cpu")
    return run, first_command(run.spec), other_commands(run.folder, run.config, ranks, device)


def _safe(drawing: Drawing) -> Drawing:
    """Mark the SVGs as HTML that is not escaped. Matplotlib has escaped the names inside them."""
    return Drawing(drawing.title, Markup(drawing.svg), Markup(drawing.narrow))


def _timeline(run: RunFiles) -> str:
    """Return the picture of the newest traced steps, as base64 of an SVG."""
    # `draw` writes a file, whose ending decides the format.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.svg")
        draw(newest_window(run.traced), path)
        return base64.b64encode(path.read_bytes()).decode()


# What the model wrote at each checkpoint: the same prompt and seed, so only the weights differ.


SEED = 1337  # of each checkpoint's text


class SampleText(NamedTuple):
    """A text, and the losses of the step at which the model wrote it."""

    step: int
    train_loss: float | None
    val_loss: float | None
    text: str


def write_samples(run: RunFiles, tokens: int) -> list[SampleText]:
    """Return a text of this many tokens from each checkpoint in the run's folder, the oldest first.

    Without checkpoints of a text model there are none. One that cannot be read is left out, with a
    warning on stderr: the page is about all the rest, too.
    """
    if not tokens or run.config.get("model") != "gpt":
        return []
    # Importing torch takes longer than the rest of the command.
    from nanoray.checkpoint.files import steps_in

    folders = steps_in(run.folder / "checkpoints", [])
    written = []
    for folder, step in sorted(folders.items(), key=lambda item: item[1]):
        print(f"sample {folder}", file=sys.stderr, flush=True)
        try:
            text = _sample(folder, tokens)
        except NanorayError as error:
            print(f"warning: no sample of {folder.name}: {error}", file=sys.stderr)
            continue
        train_loss = _newest_at(run, "train/loss", step)
        written.append(SampleText(step, train_loss, _newest_at(run, "val/loss", step), text))
    return written


def _sample(folder: Path, tokens: int) -> str:
    """Return what the model of a checkpoint writes after its tokenizer's own prompt."""
    import torch

    from nanoray.data.tokenizer import tokenizer_from_json
    from nanoray.models.sampling import write_text
    from nanoray.tools.sample import load_state, rebuild

    state, _ = load_state(folder)
    gpt, dataset = rebuild(state, torch.device("cpu"))
    return write_text(gpt, tokenizer_from_json(dataset.tokenizer), tokens, SEED)


def _newest_at(run: RunFiles, metric: str, step: int) -> float | None:
    """Return a metric's newest value up to a step; None if it was not recorded until then."""
    value = None
    for recorded, candidate in zip(*run.series(metric), strict=True):
        if recorded <= step:
            value = candidate
    return value


if __name__ == "__main__":
    raise SystemExit(main())
