"""The alerts for Prometheus: of metrics that exist, the same in every form, and with made-up series
each fires.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.kube.render import KUBE_DIR
from nanoray.machine.metrics import METRICS

MANIFEST = KUBE_DIR / "components" / "monitoring" / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(MANIFEST.read_text())["spec"]["groups"][0]["rules"]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


def test_every_query_is_of_metrics_that_exist() -> None:
    """Those of Ray that its own dashboard shows, or its agent measures."""
    panels = json.loads((MANIFEST.parent / "dashboard.json").read_text())["panels"]
    queries = [rule["expr"] for rule in RULES] + [
        t["expr"] for panel in panels for t in panel["targets"]
    ]
    package = find_spec("ray")
    assert package is not None
    assert package.submodule_search_locations is not None
    of_ray = Path(package.submodule_search_locations[0], "dashboard/modules")
    panels_of_ray = (of_ray / "metrics/dashboards/default_dashboard_panels.py").read_text()
    agent = (of_ray / "reporter/reporter_agent.py").read_text()
    known = {f"ray_nanoray_{name.replace('/', '_')}" for name in METRICS}
    known |= {*re.findall(r"\bray_\w+", panels_of_ray)} | {
        f"ray_{name}" for name in re.findall(r'"(node_\w+)"', agent)
    }
    asked = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    assert asked <= known
    assert len(asked) > 15


def test_every_alert_is_explained() -> None:
    assert re.findall(r"^\| `(Nanoray\w+)` \|", DOCS.read_text(), re.M) == [
        rule["alert"] for rule in RULES
    ]
    assert all(
        rule["annotations"]["summary"].startswith("run {{ $labels.run }}: ") for rule in RULES
    )


def series(name: str, values: str, rank: str = "0") -> dict[str, str]:
    return {"series": f'ray_nanoray_{name}{{run="r",rank="{rank}"}}', "values": values}


STEPS = series("train_tokens", "0+100x120")
RATE = series("train_lr", "1x120")
# Of each alert: series, one value a minute, with which it is quiet, and with which it fires; at
# which minute to look.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]], int]] = {
    "NanorayLossNotFinite": (
        [series("fault_skipped_steps", "3x30")],
        [series("fault_skipped_steps", "0x10 2x10")],
        15,
    ),
    "NanorayNoProgress": ([STEPS], [series("train_samples", "0+100x5 500x30")], 25),
    "NanorayStraggler": (
        [series("comm_late_ms", "10x30"), series("comm_step_ms", "100x30")],
        [series("comm_late_ms", "30x30"), series("comm_step_ms", "100x30")],
        10,
    ),
    "NanorayGoodputLow": (
        [series("time_train_s", "0+50x90")],
        [series("time_train_s", "0+20x90")],
        60,
    ),
    "NanorayCheckpointOld": (
        [RATE, series("time_checkpoint_write_s", "_x50 1x40 2x30")],
        [RATE, series("time_checkpoint_write_s", "1x20 2x100")],
        110,
    ),
    "NanorayDiskNearlyFull": ([series("disk_used", "89x9")], [series("disk_used", "91x9")], 5),
    "NanorayRankLost": (
        [series("fault_restarts", "2x30")],
        [series("fault_restarts", "0x10"), series("fault_restarts", "_x11 1x9", "1")],
        15,
    ),
}


def test_each_alert_fires_and_is_quiet(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on the PATH: apt-get install prometheus")
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "nanoray", "rules": RULES}]})
    )
    tests = []
    for name, (quiet, loud, minute) in CASES.items():
        for given, count in ((quiet, 0), (loud, 1)):
            asked = {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing",run="r"}})',
                "eval_time": f"{minute}m",
            }
            asked["exp_samples"] = [{"labels": "{}", "value": 1}] * count  # type: ignore[assignment]
            tests.append(
                {
                    "interval": "1m",
                    "name": f"{name} {count}",
                    "input_series": given,
                    "promql_expr_test": [asked],
                }
            )
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests})
    )
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert CASES.keys() == {rule["alert"] for rule in RULES}
