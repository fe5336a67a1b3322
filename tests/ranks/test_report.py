"""The page about a run, of runs that really trained; and their ledgers, which add up."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanoray.__main__ import main as command
from nanoray.inspect import __main__ as inspect
from nanoray.report.__main__ import main
from nanoray.report.charts import POINTS, thinned
from nanoray.trace.ledger import accounts_of
from tests.harness.browser import in_chromium, require_width
from tests.harness.commands import run, torchrun

HOSTILE = "</pre><script>document.title = 'taken'</script><img src=http://example.org/x.png>"
LOOKED = ("--statistics_every=2", "--memory_at=3", "--precision=fp16", "--precision_stats=every=2")
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
    two = torchrun(2, "nanoray.train", *flags, "--name=two", "--max_steps=8", "--comm_trace=always")
    one = run("nanoray.train", *flags, "--name=one", "--max_steps=4", "--lr=0.002", *LOOKED)
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
    assert page.tags.count("svg") >= 6
    summary = json.loads((runs["two"] / "summary.json").read_text())
    assert f"{summary['val_loss']:.4f}" in page.text
    for told in (
        "8 of 8",
        "2 x cpu, gloo",
        "Where the time went",
        "exposed communication",
        "comm_trace",
    ):
        assert told in page.text
    assert "Timeline of the newest traced steps" in page.html
    assert "var(--rule)" in page.html
    assert "#01020" not in page.html, "the page's own colours"


def test_a_run_from_its_own_folder(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has its name there, too; and only what was set differs from the defaults."""
    monkeypatch.chdir(runs["two"])
    for words in (["faults", "."], ["ledger", "."], ["report", "."]):
        assert command(words) == 0
    assert re.findall(r"^run +([^\s:]+)", capsys.readouterr().out, re.M) == [runs["two"].name] * 2
    page = Page(Path("report.html")).html
    assert re.search(rf"<title>[^<]*{runs['two'].name}", page)
    differing = re.findall(r'<tr class="look"><th scope="row">(\w+)</th>', page)
    assert {"name", "max_steps", "comm_trace"} < set(differing)
    assert "kube" not in differing


def test_runs_beside_each_other(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "compare.html"
    assert command(["compare", *map(str, runs.values()), "--output", str(path)]) == 0
    page = Page(path)
    differing = re.findall(r'<tr class="look"><th scope="row">(\w+)</th>', page.html)
    looked = {"statistics_every", "memory_at", "precision", "precision_stats"}
    assert set(differing) == {"name", "max_steps", "lr", "comm_trace"} | looked
    assert all(folder.name in page.text for folder in runs.values())


def test_layers_and_memory_of_a_run_that_looked(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics over steps with what they warned of, and where each rank's memory went."""
    folder = tmp_path / "run"
    shutil.copytree(runs["one"], folder)
    assert main([str(folder)]) == 0
    page = Page(folder / "report.html")
    assert "Nothing was exploding, vanishing or dead." in page.text
    assert "attention's largest logit" in page.text
    assert "Number formats" in page.text
    for title in (
        "loss scale of fp16",
        "steps that fp16 skipped",
        "steps since fp16's scale last changed",
    ):
        assert f'aria-label="{title}"' in page.html
    for title in ("gradients that are subnormal (%)", "weights that an update did not change (%)"):
        assert f'aria-label="{title}"' in page.html
    assert "memory of step 3, rank 0 on cpu: " in page.text
    assert 'aria-label="memory of rank 0 over step 3"' in page.html
    assert page.html.count("formula's peak") == 1
    monkeypatch.chdir(tmp_path)
    assert inspect.main([str(folder), "--html"]) == 0
    model = Page(tmp_path / "inspect.html")
    assert "memory of step 3, rank 0 on cpu: " in model.text
    assert model.html.count('aria-label="memory of rank 0 over step 3"') == 1, (
        "drawn on the model's page, too"
    )
    records = [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]
    records[1]["layers"]["blocks.1"] |= {"dead": 70.0, "grad_rms": None}
    (folder / "statistics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    assert main([str(folder)]) == 0
    page = Page(folder / "report.html")
    assert "exploding at step 4: the gradient of blocks.1 is not finite" in page.text
    assert "dead at step 4: 70 % of the hidden units of blocks.1" in page.text
    assert len(page.html) < 1 << 20


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


def test_no_run_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not the folder of a run (no run.json)" in capsys.readouterr().err


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


def test_a_thinned_curve_keeps_its_peaks() -> None:
    steps = list(range(10_000))
    values = [1.0] * len(steps)
    values[1234], values[8765] = 9.0, -9.0
    some, kept = thinned(steps, values)
    assert len(some) <= POINTS
    assert (dict(zip(some, kept, strict=True))[1234], dict(zip(some, kept, strict=True))[8765]) == (
        9.0,
        -9.0,
    )
    assert some == sorted(some)
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


@in_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_overflow(
    runs: dict[str, Path], tmp_path: Path, width: int
) -> None:
    page = tmp_path / "page.html"
    assert main([str(runs["two"]), "--output", str(page)]) == 0
    require_width(page, width)
