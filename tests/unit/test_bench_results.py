"""Every committed result of a benchmark can still be printed, pasted and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.__main__ import main
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.report import Report, to_json
from nanoray.bench.registry import BENCHMARKS
from tests.harness.commands import torchrun_environment
from tests.harness.figures import benchmark_named

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def results() -> dict[str, str]:
    """Return the benchmark of each committed file that one wrote, by the file's name."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "bench" in content:
            found[path.name] = content["bench"]
    return found


# What failed in a committed file, as its page says: an arm that is none of nanoray's
PEERS_FAILED = {"recovery-cpu.json": {"torchrun-script"}}


@pytest.mark.parametrize(("name", "bench"), results().items())
def test_a_committed_result_is_printed_and_pasted(name: str, bench: str) -> None:
    benchmark, report = benchmark_named(bench), Report.read(RESULTS / name)
    text = report.lines(benchmark.format_text(report) or None)
    failures = json.loads((RESULTS / name).read_text(encoding="utf-8"))["failures"]
    failed = {failure.partition(":")[0] for failure in failures}
    assert failed == PEERS_FAILED.get(name, set()), "what is committed has no other failure"
    assert text[-1].startswith("OK  ") == (not failed)
    markdown = benchmark.format_markdown(report)
    assert any(line.startswith("| ---") for line in markdown), "a table"


@pytest.mark.parametrize("name", results())
def test_a_committed_result_has_a_line_for_each_row(name: str) -> None:
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert to_json(json.loads(text)) == text


def one_of_each() -> list[Any]:
    """One result of each benchmark; the others of it are for `make test-all`."""
    found: list[Any] = []
    seen: set[str] = set()
    for name, bench in results().items():
        marks = [pytest.mark.full] if bench in seen else []
        found.append(pytest.param(name, bench, marks=marks))
        seen.add(bench)
    return found


# One panel of each is empty: of what their benchmark can measure they have a part
LACK_A_PART = {"train-comm-cpu.json", "run-recovery-cpu.json"}


@pytest.mark.parametrize(("name", "bench"), one_of_each())
def test_a_committed_result_puts_marks_on_its_panels(
    name: str, bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the picture: to lay out and paint one takes a second."""
    panels: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: panels.extend(figure.axes)
    )
    benchmark_named(bench).draw(Report.read(RESULTS / name), tmp_path / "figure.png")
    assert panels
    empty = [panel for panel in panels if not panel.has_data()]
    assert len(empty) == (name in LACK_A_PART)


def pictures() -> list[Any]:
    """All results, of which `make test` paints one."""
    (name, bench), *others = results().items()
    return [(name, bench), *(pytest.param(*other, marks=pytest.mark.full) for other in others)]


@pytest.mark.parametrize(("name", "bench"), pictures())
def test_a_committed_result_is_drawn(name: str, bench: str, tmp_path: Path) -> None:
    benchmark, report = benchmark_named(bench), Report.read(RESULTS / name)
    benchmark.draw(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_in_the_list_loads(name: str) -> None:
    assert isinstance(BENCHMARKS[name].load(), Benchmark)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_rank_of_torchrun_measures_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark starts its own ranks: it would be started once per rank."""
    for key, value in torchrun_environment(0, 2).items():
        monkeypatch.setenv(key, value)
    words = BENCHMARKS[name].words
    assert main([*words.split(), "--workers", "0", "--rounds", "x"]) == 2
    refused = f"bench {words} starts its own ranks, but a launcher has started this process"
    assert refused in capsys.readouterr().err
