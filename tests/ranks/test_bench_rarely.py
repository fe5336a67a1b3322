"""The benchmark of rarely communicating replicas, and the thin links on which it times them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import rarely
from nanoray.bench.harness import benchmark
from nanoray.bench.harness.processes import Child, arm_environment, free_port, scratch_folder
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.harness.thin_links import LinkSpeed, ThinLinks, address_of, parse_links, why_not
from nanoray.bench.rarely import (
    ARMS,
    DDP,
    IN_TIME,
    LOSS,
    OFF,
    SENT,
    SENT_FORMULA,
    STEP,
    RarelyBenchmark,
    Rates,
    loss_at,
)
from nanoray.errors import ConfigError

needs_links = pytest.mark.skipif(bool(why_not()), reason=f"no thin links here: {why_not()}")
FLAGS = ["rarely", "--preset", "tiny", "--quick", "--workers", "2", "--dataset", "stdlib"]
SMALL = ["--settings", "n_embd=32,n_head=2,n_layer=1,global_batch_size=4,warmup_steps=2"]

# Rank 1 answers each message. Rank 0 measures a small one there and back, and then a large one.
TALK = """
import os, socket, sys, time

rank, large = int(os.environ["RANK"]), int(sys.argv[1])

def receive(peer, count):
    while count:
        count -= len(peer.recv(min(count, 65536)))

if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as door:
        peer, _ = door.accept()
    began = time.monotonic()
    peer.sendall(b"x")
    receive(peer, 1)
    there_and_back = time.monotonic() - began
    began = time.monotonic()
    peer.sendall(b"x" * large)
    receive(peer, 1)
    print(there_and_back, time.monotonic() - began)
else:
    while True:
        try:
            peer = socket.create_connection(
                (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            )
            break
        except OSError:
            time.sleep(0.02)
    receive(peer, 1)
    peer.sendall(b"x")
    receive(peer, large)
    peer.sendall(b"x")
"""


def test_bytes_are_counted_between_two_moments(tmp_path: Path) -> None:
    """A sample counts from its moment on: it says what all ranks have sent by then."""
    links = ThinLinks(2, LinkSpeed(0.0, 1.0), tmp_path)
    links.samples = [(10.0, 0), (11.0, 300), (12.0, 500)]
    assert links.sent_between(10.0, 12.0) == 500
    assert links.sent_between(11.0, 11.9) == 0
    assert links.sent_between(11.5, 99.0) == 200
    assert links.sent_between(0.0, 11.0) == 300


@pytest.mark.full
@needs_links
def test_a_link_delays_and_carries_what_it_should() -> None:
    speed = LinkSpeed(delay_ms=40, mbit_per_s=8)
    large = 1_000_000  # a second at this speed; the start of TCP alone takes a third of it
    with scratch_folder() as folder:
        began = time.time()
        with ThinLinks(2, speed, folder) as links:
            port = free_port()
            ranks = []
            for rank in range(2):
                command = links.command(rank, [sys.executable, "-c", TALK, str(large)])
                place = {"MASTER_ADDR": address_of(0), "MASTER_PORT": str(port)}
                env = arm_environment() | place | {"RANK": str(rank)}
                ranks.append(Child(command, env, folder / f"{rank}.log"))
            for child in ranks:
                child.wait(30)
            small_s, large_s = map(float, (folder / "0.log").read_text().split())
            sent = links.sent_between(began, time.time())
    # Lower limits: a busy machine only takes longer.
    assert small_s >= 2 * 0.040
    assert large_s >= 0.040 + large / speed.bytes_per_s
    assert large < sent < 1.1 * large, "with headers, and what is acknowledged"


@pytest.mark.full
@needs_links
def test_an_arm_is_timed_while_its_links_get_thinner(tmp_path: Path) -> None:
    """Real ranks in namespaces; the bytes that the relay counts are those of an all-reduce."""
    file = tmp_path / "r.json"
    links = ["--links", "0.1/1000,5/50"]
    assert bench.main([*FLAGS, *SMALL, "--arms", "ddp", *links, f"--json={file}"]) == 0
    report = Report.read(file)
    count = int(report.conditions["recipe"].split("GPT of ")[1].split(" ")[0].replace(",", ""))
    for link in ("0.1 ms / 1000 Mbit/s", "5 ms / 50 Mbit/s"):
        step = report.row(DDP, f"{STEP}, {link}")
        sent = report.row(DDP, f"{SENT}, {link}")
        assert step
        assert sent
        assert step.n == rarely.WINDOWS
        # Two ranks: half of the gradients there, and half of the sums back; and some headers.
        formula = report.row(DDP, SENT_FORMULA)
        assert formula
        assert formula.values == (pytest.approx(4 * count / 1e3),)
        assert formula.median <= sent.median < 1.25 * formula.median
    assert report.row(DDP, f"{IN_TIME}, 5 ms / 50 Mbit/s")


@pytest.mark.full
def test_arms_are_tuned_and_trained_in_turn(
    tmp_path: Path, shared_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real trainings on ranks that stay alive: the tuned rates are those with the lowest loss."""
    shared_ranks(rarely)
    file = tmp_path / "r.json"
    flags = [f for f in FLAGS if f != "--quick"]
    flags += ["--arms", "H 1 averaged,H 10", "--steps", "20", "--seeds", "2", "--links", "none"]
    flags += ["--lrs", "1e-2,1e-5", "--rare_lrs", "1e-2,1e-5", "--outers", "1:0,0.01:0"]
    flags += ["--tuning_seeds", "1", f"--json={file}"]
    assert bench.main([*flags, *SMALL]) == 0
    report = Report.read(file)
    assert report.conditions["rates"] == (
        "ddp: lr 0.01; H: lr 0.01; H 10: outer_lr 1, outer_momentum 0"
    )
    tried = [row.arm for row in report.rows if row.metric == rarely.TUNING]
    assert tried == [
        "ddp, lr 0.01", "ddp, lr 1e-05", "H 50, lr 0.01", "H 50, lr 1e-05", "H 10, outer 1:0",
        "H 10, outer 0.01:0",
    ]  # fmt: skip
    for arm in (DDP, "H 1 averaged", "H 10"):
        loss = report.row(arm, LOSS)
        assert loss
        assert loss.n == 2
        assert [*loss.extra["curves"][0]] == [
            str(n) for n in (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
        ]
        assert loss.extra["curves"][0]["20"] == loss.values[0] < loss.extra["curves"][0]["1"]
    # The same seed draws the same model and samples: the losses of step 1 are those of ddp.
    firsts = {report.row(arm, LOSS).extra["curves"][0]["1"] for arm in (DDP, "H 10")}  # type: ignore[union-attr]
    assert len(firsts) == 1
    rare = report.row("H 1 averaged", OFF)
    assert rare
    assert max(map(abs, rare.values)) < 0.5


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--workers", "1"], "workers = 1: one rank communicates with no other"),
        (["--arms", "H 5"], "unknown arm H 5; did you mean H 50?"),
        (["--links", "1-100"], "links = 1-100: 1-100 is no MS/MBIT; write for example 0.1/1000"),
        (["--links", "1/0"], "links = 1/0: 1/0 is no link; a delay is at least 0 ms"),
        (["--links", "nan/1"], "nan/1 is no link"),
        (["--lrs", "1e-3,x"], "lrs = 1e-3,x: not numbers above 0; write for example 6e-3"),
        (["--lrs", "0"], "lrs = 0: not numbers above 0"),
        (["--outers", "0.7"], "outers = 0.7: 0.7 is no LR:MOMENTUM; write for example 1:0"),
        (["--steps", "0"], "steps = 0; give a number above 0"),
        (["--rare_lrs=-1"], "rare_lrs = -1: not numbers above 0"),
        (["--settings", "n_embd=33"], "n_embd"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (benchmark, rarely):
        monkeypatch.setattr(module, "RankPool", lambda _: pytest.fail("it started ranks"))
    assert bench.main([*FLAGS, *flags]) == 2
    assert text in capsys.readouterr().err


def test_links_are_read_from_fast_to_thin() -> None:
    assert parse_links("none", "1/100") == [None]
    assert parse_links("1/100,100/10", "1/100") == [LinkSpeed(1, 100), LinkSpeed(100, 10)]
    assert str(LinkSpeed(0.1, 1000)) == "0.1 ms / 1000 Mbit/s"
    with pytest.raises(ConfigError):
        parse_links("", "1/100")


def test_a_loss_between_two_evaluations_lies_on_a_line() -> None:
    curve = {1: 4.0, 11: 3.0, 21: 2.5}
    assert [loss_at(curve, step) for step in (0, 1, 6, 11, 16, 21, 99)] == [
        4.0, 4.0, 3.5, 3.0, 2.75, 2.5, 2.5,
    ]  # fmt: skip


def test_rates_of_arms() -> None:
    """Averaged weights keep their outer optimizer, and the other arms take what was tuned."""
    rates = Rates(ddp_lr=4e-3, rare_lr=8e-3, outers={10: (1.0, 0.3), 50: (0.7, 0.9)})
    assert rates.of(DDP)["lr"] == 4e-3
    assert rates.of("H 1 averaged") == {"lr": 8e-3, "min_lr": 8e-4}
    assert rates.of("H 50") == {
        "lr": 8e-3, "min_lr": 8e-4, "outer_lr": 0.7, "outer_momentum": 0.9,
    }  # fmt: skip
    assert rates.of("H 50 8 bits") == rates.of("H 50")
    assert rates.of("H 10")["outer_momentum"] == 0.3
    assert "outer_lr" not in rates.of("H 50 averaged")
    assert str(rates) == (
        "ddp: lr 0.004; H: lr 0.008; H 10: outer_lr 1, outer_momentum 0.3; H 50: outer_lr 0.7, "
        "outer_momentum 0.9"
    )
    assert ARMS["H 50 averaged"]["outer_momentum"] == 0


def report_by_hand() -> Report:
    """Two arms on one link: ddp has lower losses, and reaches them 10 times later."""
    report = Report("rarely", {})
    link = "1 ms / 1 Mbit/s"
    for arm, losses, ms, kb in (
        (DDP, (2.0, 2.1), 1000.0, 500.0),
        ("H 50", (2.1, 2.2), 100.0, 10.0),
    ):
        report.rows.append(Measurement(arm, LOSS, "nat", losses))
        report.rows.append(Measurement(arm, f"{STEP}, {link}", "ms", (ms,)))
        report.rows.append(Measurement(arm, f"{SENT}, {link}", "kB", (kb,)))
    report.rows.append(Measurement("H 50", OFF, "nat", (0.1, 0.1)))
    curves: dict[str, Any] = {
        DDP: [{1: 4.0, 100: 2.0}, {1: 4.0, 100: 2.1}],
        "H 50": [{1: 4.0, 100: 2.1}, {1: 4.0, 100: 2.2}],
    }
    rarely.add_equal_time_rows(report, curves, {(DDP, link): 1.0, ("H 50", link): 0.1}, 100)
    return report


def test_loss_in_equal_time_by_hand() -> None:
    report = report_by_hand()
    link = "1 ms / 1 Mbit/s"
    ddp = report.row(DDP, f"{IN_TIME}, {link}")
    rare = report.row("H 50", f"{IN_TIME}, {link}")
    assert ddp
    assert rare
    # In 10 s ddp does 10 of 100 steps: 9/99 of the way from 4 to 2, and to 2.1.
    assert ddp.values == pytest.approx((4 - 2 * 9 / 99, 4 - 1.9 * 9 / 99))
    assert ddp.note == "after 10 s it has done 10 of 100 steps"
    assert rare.values == (2.1, 2.2)
    assert RarelyBenchmark().finding(report) == [
        "H 50: +0.100 nat after equal tokens for 50 x fewer bytes (ddp's own 2 seed(s) differ by "
        "0.100)",
        "1 ms / 1 Mbit/s: lowest loss in equal time H 50, 2.150; ddp 3.823",
    ]


def test_a_report_is_written_and_drawn(tmp_path: Path) -> None:
    report = report_by_hand()
    for row in report.rows:
        if row.metric == LOSS:
            row.extra["curves"] = [{"1": 4.0, "100": loss} for loss in row.values]
    benchmark = rarely.RarelyBenchmark()
    file = tmp_path / "r.json"
    report.write(file)
    again = Report.read(file)
    assert benchmark.format_markdown(again) == benchmark.format_markdown(report)
    assert "| H 50 | 2.150 (2.100–2.200) | +0.100 (+0.100–+0.100) | 10.0 |" in "\n".join(
        benchmark.format_markdown(again)
    )
    assert any(line.startswith("arm ") for line in benchmark.format_text(again))
    again.conditions = {"command": "x", "date": "y", "cpu": {"name": "z"}}
    benchmark.draw(again, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(file.read_text())["rows"]
