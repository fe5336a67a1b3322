"""The benchmarks' page: what it says, that it needs nothing else, and how a browser shows it; and
`bench all`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nanoray.bench import __main__ as bench
from nanoray.bench.harness.html import line, write
from nanoray.bench.harness.report import Measurement, Report, Section, Target, conditions
from nanoray.bench.registry import Entry
from tests.harness.browser import chromium, in_chromium
from tests.harness.commands import torchrun_environment

HOSTILE = "</td><script>document.title = 'taken'</script><img src=http://example.org/x.png onerror=alert(1)> & \"'"
SVG = (
    '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20">'
    '<rect width="40" height="20" fill="#ff00ff"/></svg>'
)


def report_of(name: str = "train", hostile: str = HOSTILE) -> Report:
    ring = Measurement(
        "ring", "1 KiB", "us", (8.0, 10.0, 9.0, 12.0, 30.0), hostile, wrong=0, extra={"bytes": 1024}
    )
    rows = [
        ring,
        Measurement("tree", "1 KiB", "us", (2.0,)),
        Measurement("flat", "9 GiB", "us", (), skipped="needs 9 GiB, 4 free"),
    ]
    return Report(
        name, conditions(name, ["--quick"]), rows, [Target("ring in time", ring, "<=", 11.0)]
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    write(path, [Section(report_of(), SVG)], {"train": "what it measures"})
    return path


class References(HTMLParser):
    """Collects what a browser would load, and the text it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.scripts = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.references += [
            value or ""
            for key, value in attrs
            if key in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


# What the page says


def test_the_page_needs_nothing_else_and_escapes_what_it_is_told(page: Path) -> None:
    html = page.read_text()
    found = References()
    found.feed(html)
    assert [r.split(",")[0] for r in found.references] == ["data:image/svg+xml;base64"]
    assert found.scripts == 1
    assert HOSTILE in found.text
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert [p.name for p in page.parent.iterdir()] == ["page.html"]


def test_numbers_verdicts_and_reasons_are_on_the_page(page: Path) -> None:
    found = References()
    found.feed(page.read_text())
    for text in (
        "✓ OK",
        "what it measures",
        "python -m nanoray.bench train --quick",
        "≤ 11",
        "10.000",
        "8.00 – 30.0",
    ):
        assert text in found.text, text
    for text in ("9.00 – 12.0", "skipped", "needs 9 GiB, 4 free", "wrong"):
        assert text in found.text, text


def test_a_failed_report_says_so_first(tmp_path: Path) -> None:
    good, bad = report_of("overlap", ""), report_of("scaling", "")
    bad.failures.append("rank 1: killed\nthe last line of its log")
    bad.rows.append(Measurement("tree", "2 KiB", "us", (1.0, 2.0), wrong=7))
    write(tmp_path / "all.html", [Section(good), Section(bad)], {})
    found = References()
    found.feed(html := (tmp_path / "all.html").read_text())
    assert [r for r in found.references if r] == ["#overlap", "#scaling"]
    assert "2 benchmarks, failed: scaling" in found.text
    # The verdict on all stands on top
    assert found.text.index("✕ FAILED") < found.text.index("✓ OK")
    assert "the last line of its log" in found.text
    assert "tree, 2 KiB: 7 wrong" in found.text
    assert html.count("<dt>versions</dt>") == 1, "what all share is told once"
    assert html.count("<dt>command</dt>") == 2


def test_a_benchmarks_own_words_and_what_its_wrong_counts(tmp_path: Path) -> None:
    own, path = [f"fastest: {HOSTILE}", "  a table of its own"], tmp_path / "own.html"
    write(
        path,
        [
            Section(report_of("overlap", ""), "", own, "gradients that differ"),
            Section(report_of("ring")),
        ],
        {},
    )
    found = References()
    found.feed(path.read_text())
    assert "\n".join(own) in found.text
    assert found.scripts == 1
    assert found.text.index("Findings") < found.text.index("Rows")
    assert found.text.count("Findings") == 1
    assert "Wrong: gradients that differ." in found.text
    assert "Wrong: elements that differ from the exact result." in found.text


def test_what_cannot_be_written_leaves_no_other_file(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = page.read_text()
    monkeypatch.setattr(
        "nanoray.base.atomic.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        write(page, [Section(report_of())], {})
    assert [p.name for p in page.parent.iterdir()] == ["page.html"]
    assert page.read_text() == old


def test_the_marks_of_the_spread() -> None:
    """Median 10: 5 is the left end of the strip, 15 the right end, and what lies beyond is cut off."""
    assert line(Measurement("a", "m", "s", (5.0, 7.5, 10.0, 12.5, 15.0))).marks == (0, 25, 75, 100)
    assert line(Measurement("a", "m", "s", (1.0, 10.0, 90.0))).marks == (0, 5, 100, 100)
    assert (
        line(Measurement("a", "m", "s", (3.0,))).marks
        == line(Measurement("a", "m", "s", (0.0, 0.0))).marks
        == ()
    )


# How a browser shows it


@in_chromium
@pytest.mark.parametrize(
    ("scheme", "size"), [("1", "1200,1000"), ("0", "500,1000")], ids=["light", "dark, narrow"]
)
def test_a_browser_paints_it(page: Path, scheme: str, size: str) -> None:
    """The verdict is green, the figure is there, and paper is light or dark as the reader wants it."""
    shot = page.parent / "shot.png"
    chromium(
        page,
        f"--window-size={size}",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={shot}",
    )
    image = Image.open(shot).convert("RGB")
    colours: list[Any] = [rgb for _, rgb in image.getcolors(image.width * image.height) or []]
    assert len(colours) > 50
    paper = image.getpixel((1, 1))
    assert isinstance(paper, tuple)
    assert (sum(paper) > 600) == (scheme == "1")
    assert any(g > r + 30 and g > b + 30 for r, g, b in colours), "the verdict"
    assert any(r > g + 100 and b > g + 100 for r, g, b in colours), "the figure"


@in_chromium
def test_a_browser_runs_the_pages_own_script_and_no_other(page: Path) -> None:
    """A click on `median` puts tree, 2, before ring, 10; what a note smuggled in did not run."""
    script = 'document.querySelectorAll(".rows th")[2].click();'
    html = page.read_text()
    end = html.rindex("</script>")
    page.write_text(html[:end] + script + html[end:])
    dom = chromium(page, "--dump-dom")
    assert "<title>nanoray bench train: OK</title>" in dom
    assert re.findall(r"<td>(ring|tree|flat)</td>", dom) == ["flat", "tree", "ring"]
    smuggled = html.replace("<footer>", "<script>document.title = 'taken'</script><footer>")
    page.write_text(smuggled)
    assert "<title>nanoray bench train: OK</title>" in chromium(page, "--dump-dom"), (
        "the page's policy forbids it"
    )


# bench all, with benchmarks that take no time

FAKE = """
import os, sys
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.processes import Child
from nanoray.bench.harness.report import Measurement
from nanoray.errors import ConfigError

class Fake(Benchmark):
    joins_torchrun = True

    def add_flags(self, parser):
        parser.add_argument("--workers", type=int, default=2)

    def measure(self, args, report):
        report.rows.append(
            Measurement("ring", "1 KiB", "us", (float(args.workers), 3.0), f"quick {args.quick}", wrong=0)
        )
        ENDING

    def draw(self, report, path):
        from matplotlib import pyplot
        figure, axes = pyplot.subplots()
        axes.plot(report.rows[0].values)
        figure.savefig(path)
        pyplot.close(figure)

    def format_markdown(self, report):
        return ["to paste"]

    def format_text(self, report):
        return ["a table of its own"]
"""
ENDINGS = {
    "fine": "",
    "broken": "raise ZeroDivisionError('by nothing')",
    "picky": "report.rows.clear()\n"
    "        if args.workers > 3: raise ConfigError(f'workers = {args.workers}; use 3 or less')",
    "refused": "raise ConfigError('no such device')",
    "nothing yet": "report.rows.clear(); raise KeyboardInterrupt",
    "waiting": "import subprocess; p = subprocess.Popen(['sleep', '60'])\n"
    "        try:\n            print('pid', p.pid, flush=True); p.wait()\n"
    "        finally:\n            p.kill(); "
    "p.wait()",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, ending in ENDINGS.items():
        (folder / f"fake_{name}.py").write_text(FAKE.replace("ENDING", ending))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def choose(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", {name: entry_of(name) for name in names})


def entry_of(name: str) -> Entry:
    return Entry(f"is {name}", lambda: importlib.import_module(f"fake_{name}").Fake())


def test_all_goes_on_after_what_breaks(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "broken", "refused", "missing", "fine")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    files = [
        "--json",
        str(tmp_path / "all.json"),
        "--html",
        str(tmp_path / "all.html"),
        "--figure",
        str(pictures),
    ]
    assert bench.main(["all", "--quick", "--workers", "5", *files]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "FAILED  broken, refused, missing"
    table = [line.split(maxsplit=3) for line in out.splitlines()[-5:-1]]
    assert [(words[0], words[1]) for words in table[:2]] == [
        ("broken", "FAILED"),
        ("refused", "FAILED"),
    ]
    assert table[0][3] == "ZeroDivisionError: by nothing"
    assert "no such device" in " ".join(table[1])
    assert "ModuleNotFoundError: No module named 'fake_missing'" in " ".join(table[2])
    assert (table[3][:2], table[3][3]) == (["fine", "OK"], "1 rows, 0 target(s)")
    written = json.loads((tmp_path / "all.json").read_text())
    assert (written["bench"], written["ok"]) == ("all", False)
    assert [report["ok"] for report in written["reports"]] == [False, False, False, True]
    assert [r["values"] for r in written["reports"][0]["rows"]] == [[5, 3]], (
        "what was measured before it broke"
    )
    assert written["reports"][3]["rows"][0]["note"] == "quick True"
    assert [r["values"] for r in written["reports"][1]["rows"]] == [[5, 3]], (
        "what was measured before it gave up"
    )
    assert sorted(p.name for p in pictures.iterdir()) == ["broken.png", "fine.png", "refused.png"]
    assert (tmp_path / "all.html").read_text().count("data:image/svg+xml;base64,") == 3


def test_all_is_ok_when_all_are(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "fine")
    assert bench.main(["all"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "OK  1 benches"
    assert "a table of its own" in out


def test_one_that_refuses_so_many_ranks_is_skipped(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "picky", "fine")
    files = ["--json", str(tmp_path / "all.json"), "--html", str(tmp_path / "all.html")]
    assert bench.main(["all", "--workers", "4", *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "OK  1 benches, skipped: picky"
    assert "skipped  workers = 4; use 3 or less" in out
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["ok"]
    assert [report.get("skipped") for report in written["reports"]] == [
        "workers = 4; use 3 or less",
        None,
    ]
    found = References()
    found.feed((tmp_path / "all.html").read_text())
    assert "Not run: workers = 4; use 3 or less" in found.text
    assert "FAILED" not in found.text
    choose(monkeypatch, "picky")
    assert bench.main(["all", "--workers", "4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED  every bench refuses workers = 4"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--workers", "abc"],
            "argument --workers: invalid int value: 'abc'; see nanoray bench all --help",
        ),
        (["--workers", "0"], "workers = 0; give 1 or more, or leave it out for each one's default"),
        (["--json", "."], "json = . is a folder; name a file in it: report.json"),
        (["--html", "."], "html = . is a folder; name a file in it: report.html"),
        (
            ["--figure", "report.png"],
            "figure = report.png: bench all draws several; name a folder that is there",
        ),
    ],
)
def test_what_all_refuses(
    fakes: Path,
    flags: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    choose(monkeypatch, "fine")
    assert bench.main(["all", *flags]) == 2
    assert capsys.readouterr() == ("", f"error: {text}\n")


@pytest.mark.parametrize("flag", ["json", "html", "figure"])
def test_a_folder_is_no_file(
    fakes: Path,
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    choose(monkeypatch, "fine")
    (folder := tmp_path / "folder.png").mkdir()
    assert bench.main(["fine", f"--{flag}", str(folder)]) == 2
    assert (
        f"{flag} = {folder} is a folder; name a file in it: {folder}/report."
        in capsys.readouterr().err
    )


def test_the_summary_is_said_before_files_are_written(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "fine")
    monkeypatch.setattr(
        bench, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        bench.main(["all", "--json", str(tmp_path / "all.json")])
    assert capsys.readouterr().out.splitlines()[-1] == "OK  1 benches"


def test_a_benchmark_that_breaks_keeps_what_it_measured(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "broken")
    assert (
        bench.main(
            ["broken", "--json", str(tmp_path / "b.json"), "--html", str(tmp_path / "b.html")]
        )
        == 1
    )
    out = capsys.readouterr().out
    assert out.startswith("to paste\n")
    assert out.splitlines()[-1] == "FAILED  ZeroDivisionError: by nothing"
    assert "fake_broken.py" in out, "the traceback"
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["values"] == [2, 3]
    assert "ZeroDivisionError: by nothing" in (tmp_path / "b.html").read_text()


def test_a_figure_that_cannot_be_drawn_is_a_failure(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "undrawn")
    (fakes / "fake_undrawn.py").write_text(
        FAKE.replace("ENDING", "").replace("axes.plot", "axes.no_such_plot")
    )
    assert bench.main(["undrawn", "--html", str(tmp_path / "u.html")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED  figure: AttributeError: ")
    assert "figure: AttributeError: " in (tmp_path / "u.html").read_text()


def test_one_rank_of_torchrun_speaks(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose(monkeypatch, "fine")
    for name, value in torchrun_environment(1, 2).items():
        monkeypatch.setenv(name, value)
    assert (
        bench.main(["fine", "--json", str(tmp_path / "r.json"), "--html", "on/another/host.html"])
        == 0
    )
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "r.json").exists()
    choose(monkeypatch, "told")
    (fakes / "fake_told.py").write_text(
        FAKE.replace("ENDING", "report.failures.append('it broke\\nhere')")
    )
    assert bench.main(["told"]) == 1
    assert capsys.readouterr() == ("", "rank 1: it broke\nrank 1: here\n")
    choose(monkeypatch, "fine")
    assert bench.main(["all"]) == 2
    assert (
        "bench all starts its own ranks, but RANK is set; run it without torchrun"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("RANK", "0")
    assert bench.main(["fine", "--json", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out.endswith("OK  1 rows, 0 target(s)\n")
    assert (tmp_path / "r.json").exists()


def test_ctrl_c_ends_all_of_them_and_keeps_what_was_measured(fakes: Path, tmp_path: Path) -> None:
    code = (
        "import fake_waiting, fake_fine\n"
        "from nanoray.bench import __main__ as bench\n"
        "entry = bench.Entry\n"
        "bench.BENCHMARKS = {\n"
        "    'waiting': entry('', fake_waiting.Fake), 'fine': entry('', fake_fine.Fake)\n"
        "}\n"
        "raise SystemExit(bench.main())\n"
    )
    env = os.environ | {"PYTHONPATH": f"{fakes}{os.pathsep}{Path(bench.__file__).parents[2]}"}
    argv = [sys.executable, "-c", code, "all", "--json", str(tmp_path / "all.json")]
    run = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    word, pid = run.stdout.readline().split()
    assert word == "pid"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=200)
    assert run.returncode == 130
    assert "FAILED  interrupted by SIGINT with 2 round(s) measured" in out
    assert "fine" not in out + err
    assert not Path(f"/proc/{pid}").exists()
    (report,) = json.loads((tmp_path / "all.json").read_text())["reports"]
    assert report["rows"][0]["values"] == [2.0, 3.0]
    assert not report["ok"]


def test_ctrl_c_before_the_first_value_writes_no_report(
    fakes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    choose(monkeypatch, "nothing yet")
    assert bench.main(["nothing yet", "--json", str(tmp_path / "r.json")]) == 130
    text = "interrupted: everything that was started is ended, no report was written"
    assert text in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
