"""The page about a run, of runs that really trained; and their ledgers, which add up."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanoray.observe.report.__main__ import main
from nanoray.observe.trace.accounts import accounts_of
from tests.harness.commands import run, torchrun

HOSTILE = "</pre><script>document.title = 'taken'</script><img src=http://example.org/x.png>"
FLAGS = (
    "--preset=tiny",
    "--device=cpu",
    "--log_every=1",
    "--eval_every=3",
    "--tensorboard=false",
    "--dropout=0",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, Path]:
    """A traced run of two ranks, and a run of one process with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    flags = (*FLAGS, f"--dataset={text}", f"--data_dir={folder}/data", f"--out_dir={folder}")
    more = ("--max_steps=8", "--comm_trace=always", "--checkpoint_every=4")
    two = torchrun(2, "nanoray.train", *flags, "--name=two", *more)
    one = run("nanoray.train", *flags, "--name=one", "--max_steps=4", "--lr=0.002")
    for done in (*two, one):
        assert done.returncode == 0, done.stdout + done.stderr
    return {name: next(folder.glob(f"*_{name}")) for name in ("one", "two")}


class Page(HTMLParser):
    """Collects what a browser would load or run, and the text that it would show."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or ""
            for key, value in attrs
            if key in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_run_on_one_page(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs["two"])]) == 0
    path = runs["two"] / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = Page(path)
    assert len(page.html) < 1 << 20
    assert all(
        reference.startswith(("#", "data:image/svg+xml;base64,")) for reference in page.references
    )
    assert "script" not in page.tags
    assert page.tags.count("img") == 5, "the five charts"
    # How it ended, four figures, the loss, and then the rest.
    parts = ('class="badge good">finished<', "<dt>validation loss</dt>", 'id="loss"', 'id="charts"')
    places = [page.html.index(part) for part in parts]
    assert places == sorted(places)
    assert page.html.count("<dt>") == 4
    assert "–" not in page.text
    summary = json.loads((runs["two"] / "summary.json").read_text())
    assert f"{summary['val_loss']:.4f}" in page.text
    for told in (
        "8 of 8",
        "2 x cpu, gloo",
        "exposed communication",
        "comm_trace",
    ):
        assert told in page.text


def test_a_killed_run_and_a_hostile_one_have_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["two"], folder)
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')  # torn
    assert main([str(folder)]) == 0
    assert "not ended" in Page(folder / "report.html").text
    shutil.copy(runs["two"] / "summary.json", folder)
    summary = json.loads((folder / "summary.json").read_text()) | {
        "sample": HOSTILE,
        "exit_reason": HOSTILE,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main([str(folder)]) == 0
    page = Page(folder / "report.html")
    assert page.text.count(HOSTILE) >= 2
    assert "script" not in page.tags
    assert all(reference.startswith(("#", "data:")) for reference in page.references)


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_ledger_of_a_real_run_adds_up(runs: dict[str, Path], name: str) -> None:
    """Each second from the command to its end, on each rank; the ranks' clock is the one of the
    summary.
    """
    found, summary = accounts_of(runs[name]), json.loads((runs[name] / "summary.json").read_text())
    assert found.slots == summary["world_size"]
    assert -0.001 < found.wall_s - summary["total_s"] < 20, "it lasts until the last rank has ended"
    assert found.total == pytest.approx(found.slots * found.wall_s, rel=0.01)
    for account in ("start", "evaluation", "checkpoint"):
        assert found.seconds[account] > 0
    # On a busy machine the messages of a model as small as this can take all of a step.
    assert found.seconds["compute"] + found.seconds["exposed communication"] > 0
    assert found.seconds["recovery"] == found.seconds["repeated"] == 0
    assert found.traced == (name == "two")
    assert (found.seconds["exposed communication"] > 0) == found.traced


@pytest.mark.full
def test_a_comparison_marks_each_cell_that_differs(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "compare.html"
    two, one = str(runs["two"]), str(runs["one"])
    assert main(["compare", two, one, two, "--output", str(path)]) == 0
    html = path.read_text(encoding="utf-8")
    row = re.search(r'<th scope="row">lr</th>(.*?)</tr>', html)
    assert row
    marks = re.findall(r"<td( class=\"differs\")?>", row[1])
    assert [bool(mark) for mark in marks] == [False, True, False]
    summaries = [json.loads((runs[name] / "summary.json").read_text()) for name in ("two", "one")]
    change = 100 * (summaries[1]["val_loss"] / summaries[0]["val_loss"] - 1)
    assert f"{change:+.1f} %</span>" in html
