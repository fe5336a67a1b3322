"""A new way to share the work is its own two files, and few lines in six others.

The test adds one to a copy of the package, as docs/adding-a-parallelism.md describes it: the axis
`xp`, whose ranks read the same samples, have whole weights, and send each other one message.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.config.layout import Coords
from tests.harness.parsing import parse

PACKAGE = Path(__file__).resolve().parents[2] / "nanoray"
MOST_FILES = 6

# Its own two files
OWN = {
    "parallel/xp.py": '''
"""A dummy: its ranks do the same."""

from __future__ import annotations

from torch import nn

from nanoray.parallel.axis import Axis


def cut(model: nn.Module, axis: Axis) -> None:
    """Cut nothing."""
''',
    "cli/forecast/parallelisms/xp.py": '''
"""What the dummy says of itself."""

from __future__ import annotations

from nanoray.cli.forecast.parallelisms.record import Parallelism, Sender, Talk, every_size


def _talks(sender: Sender) -> list[Talk]:
    if sender.layout.xp == 1:
        return []
    return [Talk("xp", "all_reduce", "greetings", sender.accum, 1e6, "forward")]


XP = Parallelism(
    key="xp",
    in_pass=True,
    talks=_talks,
    tries=every_size("xp"),
)
''',
}

# And of CONTRIBUTING.md: a preset is a file of its own, a command one file and a row of the catalog.
PRESET_AND_COMMAND = {
    "config/presets/greeting.yaml": "n_layer: 3\nn_head: 2\nn_embd: 32\nmicro_batch_size: 1\n",
    "cli/greet.py": '''
"""`nanoray greet`"""


def main(argv: list[str]) -> int:
    """Return a number."""
    return len(argv)
''',
}
CATALOG = (
    "COMMANDS = {\n",
    'COMMANDS = {\n    "greet": CommandLine("train", "nanoray.cli.greet", ""),\n',
)

# The other files: (an existing text, what takes its place)
TOUCHED = {
    # The key, and the line that makes it an axis.
    "config/mesh.py": [
        (
            '    AxisKey("ep", in_replica=False, cuts_model=True, goes_with_ddp=False),\n',
            '    AxisKey("ep", in_replica=False, cuts_model=True, goes_with_ddp=False),\n'
            '    AxisKey("xp", in_replica=True, cuts_model=False),\n',
        ),
        (
            '    tp: Positive = field(1, "dist")\n',
            '    xp: Positive = field(1, "dist")\n'
            '    """ranks that greet each other"""\n\n'
            '    tp: Positive = field(1, "dist")\n',
        ),
    ],
    # What it does not go with.
    "config/conflicts.py": [
        (
            '    refused("tp above 1", _NO_GPT, "it cuts the layers of a gpt", "drop tp"),\n',
            '    refused("tp above 1", _NO_GPT, "it cuts the layers of a gpt", "drop tp"),\n'
            '    refused("xp above 1", "replicas above 1", "they do not greet", "drop xp"),\n',
        ),
    ],
    # Where its ranks stand: outside of the stages of a pipeline.
    "config/layout.py": [
        ("    replicas: int = 0\n", "    replicas: int = 0\n    xp: int = 0\n"),
        ("    replicas: int = 1\n", "    replicas: int = 1\n    xp: int = 1\n"),
        (
            '            "pp": Steps(self.tp * self.cp * self.dp, self.pp),\n',
            '            "pp": Steps(self.tp * self.cp * self.dp, self.pp),\n'
            '            "xp": Steps(self.tp * self.cp * self.dp * self.pp, self.xp),\n',
        ),
    ],
    # What it does to a model.
    "parallel/plan.py": [
        (
            "    stage: pp.Stage | None = None\n",
            '    if axes["xp"].size > 1:\n'
            '        xp.cut(model, axes["xp"])\n\n'
            "    stage: pp.Stage | None = None\n",
        ),
        (
            "from nanoray.parallel import cp, ep, hybrid, pp, tp\n",
            "from nanoray.parallel import cp, ep, hybrid, pp, tp, xp\n",
        ),
    ],
    # Its record.
    "cli/forecast/parallelisms/registry.py": [
        ("pipeline, tensor\n", "pipeline, tensor, xp\n"),
        ("    experts.EXPERTS,\n", "    experts.EXPERTS,\n    xp.XP,\n"),
    ],
}

# What the copy of the package is asked, in a process of its own
QUESTIONS = """
import json
from pathlib import Path

import nanoray.parallel.plan
from nanoray.__main__ import main
from nanoray.bench.strategies import _fits
from nanoray.cli import Loaded, Scale, parse_args
from nanoray.config import make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import ConfigError
from nanoray.cli.forecast.dry_run import dry_run_lines
from nanoray.cli.forecast.job import job_of
from nanoray.cli.forecast.layouts import candidates, refusal
from nanoray.cli.run_plan import forecast_at
from nanoray.launch.recovery.shares import no_replica
from nanoray.config.layout import DIVISIONS, Layout

small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "micro_batch_size": 1}
small |= {"grad_accum_steps": 1, "max_steps": 10, "device": "cpu", "precision": "fp32", "tp": 2}
config = make_config({**small, "xp": 2})
layout = Layout.of(config, 8)
data = DatasetInfo("shakespeare", "", Path(), "uint16", 65, 10**6, 10**3, "", "", {})
sharded = job_of(make_config({**small, "tp": 1, "dp_mode": "zero1"}), 65, 8)
greeting = parse_args(["--preset", "greeting", "--device", "cpu"], "nanoray", "")
loaded = parse_args(["--preset", "tiny", "--device", "cuda", "--xp", "2"], "nanoray", "")

def refused(**values):
    try:
        make_config({**small, **values})
    except ConfigError as error:
        return str(error)

print(json.dumps({
    "sizes": layout.sizes(),
    "name": str(layout),
    "groups": layout.groups("xp"),
    "place": layout.coords(7)._asdict(),
    "divisions": DIVISIONS,
    "axes": layout.axes,
    "dry_run": dry_run_lines(config, [], layout, data, ""),
    "forecast": forecast_at(loaded, Scale(8, "nvlink-400g", None)),
    "candidates": [str(one) for one in candidates(sharded, 8, 2)],
    "refused_by_search": refusal(sharded, Layout(dp=4, xp=2, replicas=2)),
    "refused": refused(xp=2, replicas=2, dp_mode="zero1"),
    "recovery": no_replica(config, [0, 1, 2]),
    "preset": greeting.config.n_layer,
    "command": main(["greet", "one", "two"]),
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("new")
    copy = folder / "nanoray"
    shutil.copytree(PACKAGE, copy)  # what is compiled, too: a copy has the time of its original
    for name, text in (OWN | PRESET_AND_COMMAND).items():
        assert not (copy / name).exists()
        (copy / name).write_text(text, encoding="utf-8")
    for name, changes in (TOUCHED | {"cli/catalog.py": [CATALOG]}).items():
        text = (copy / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"{name} has changed: {old!r} is not in it once"
            text = text.replace(old, new)
        (copy / name).write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_new_parallelism_touches_at_most_six_files_outside_its_own() -> None:
    assert len(TOUCHED) <= MOST_FILES
    assert len(OWN) == 2


def test_it_has_a_size_and_groups(answers: dict[str, Any]) -> None:
    assert answers["sizes"] == {
        "dp": 2,
        "tp": 2,
        "pp": 1,
        "ep": 1,
        "cp": 1,
        "replicas": 1,
        "xp": 2,
    }
    assert answers["name"] == "dp 2 × tp 2 × xp 2"
    assert answers["groups"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert answers["place"]["xp"] == 1
    assert "xp" in answers["divisions"], "a resume compares it"
    assert "xp" in answers["axes"], "a run forms its process groups, and traces them"


def test_it_is_in_a_dry_run(answers: dict[str, Any]) -> None:
    assert answers["dry_run"][0] == "mesh       8 rank(s) = dp 2 × tp 2 × xp 2"
    (step,) = [line for line in answers["forecast"] if line.startswith("step ")]
    assert "exposed xp " in step


def test_it_is_in_the_search(answers: dict[str, Any]) -> None:
    assert "dp 4 × xp 2" in answers["candidates"]
    assert "dp 4 (2 replicas) × xp 2" in answers["candidates"]


def test_it_is_refused_by_the_table(answers: dict[str, Any]) -> None:
    reason = "xp = 2 with replicas = 2: they do not greet; drop xp"
    assert answers["refused"] == answers["refused_by_search"] == reason


def test_it_is_in_recovery(answers: dict[str, Any]) -> None:
    assert "whole number of replicas of 1*2*1*1*2 = cp*tp*pp*ep*xp ranks" in answers["recovery"]


def test_a_preset_is_one_file_and_a_command_one_file_and_a_row(answers: dict[str, Any]) -> None:
    assert answers["preset"] == 3
    assert answers["command"] == 2


# ---- no second list of axes ----------------------------------------------------------------------

# Where three or more axes may be named together, and why
ALLOWED = {
    "config/layout.py": "the one place: where the ranks of each axis stand",
    "models/costs.py": "the cut of a model's activations, an argument of its formulas",
    "models/weights.py": "the cut of a model's weights, an argument of its formulas",
}


def axes_named_together(tree: ast.AST) -> list[int]:
    """Return the lines of literals, products, texts and calls with three or more axes."""
    lines = set()
    for node in ast.walk(tree):
        named = set[str]()
        parts: list[ast.AST] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key]
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.JoinedStr):
            parts = [*ast.walk(node)]
        elif isinstance(node, ast.Call):
            parts = [*node.args]
            named |= {word.arg for word in node.keywords if word.arg}
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                named.add(part.value)
            elif isinstance(part, ast.Attribute):
                named.add(part.attr)
        if len(named & {*Coords._fields}) >= 3:
            lines.add(getattr(node, "lineno", 0))
    return sorted(lines)


def test_axes_are_listed_in_one_place() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if len({*re.findall(r"\w+", source)} & {*Coords._fields}) < 3:
            continue
        lines = axes_named_together(parse(source))
        if lines:
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert found.keys() == ALLOWED.keys(), (
        f"{found}: a list of axes by hand misses the next one; loop over AXES, Layout.sizes() or "
        "PARALLELISMS"
    )


@pytest.mark.parametrize(
    "text",
    [
        'for axis in ("tp", "cp", "pp"): pass',
        'sizes = {"tp": 1, "pp": 1, "ep": 1}',
        "ranks = config.cp * config.tp * config.pp",
        "whole = config.cp == 1 and config.tp == 1 and config.pp == 1",
        "key = (place.tp, place.pp, place.ep)",
        'text = f"{config.cp}*{config.tp}*{config.pp}"',
        "place = Coords(tp=0, pp=stage, ep=0)",
    ],
)
def test_a_list_by_hand_is_found(text: str) -> None:
    assert axes_named_together(parse(text)) == [1]
    assert axes_named_together(parse('pair = ("tp", "ep", size)')) == []
