"""Environment variables of the ranks: what is taken, what is refused, and what is written nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.config import make_config
from nanoray.config.variables import explicit, values_of
from nanoray.errors import ConfigError

BATCH = {"micro_batch_size": 1}
SHELL = {"HF_TOKEN": "a secret", "LANG": "C"}


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (["A=1", "B"], {"A": "1", "B": None}),
        ("A=1=2", {"A": "1=2"}),
        (["A="], {"A": ""}),
        ({"A": 1, "B": None, "C": "x"}, {"A": "1", "B": None, "C": "x"}),
        ([], {}),
    ],
)
def test_flags_and_yaml_become_one_mapping(given: Any, variables: dict[str, Any]) -> None:
    assert make_config(BATCH | {"env": given}).env == variables


def test_a_variable_without_a_value_has_that_of_the_shell_and_is_written_nowhere() -> None:
    loaded = parse_args(["--env", "HF_TOKEN", "--env", "A=1"], "nanoray launch", "")
    assert loaded.config.env == {"HF_TOKEN": None, "A": "1"}
    assert "a secret" not in loaded.config.to_json()
    assert make_config(json.loads(loaded.config.to_json())) == loaded.config
    assert values_of(loaded.config.env, SHELL, False) == {"HF_TOKEN": "a secret", "A": "1"}
    assert explicit(loaded.config.env) == {"A": "1"}


@pytest.mark.parametrize(
    ("variables", "started", "problem"),
    [
        (
            {"NOT_SET": None},
            False,
            r"env NOT_SET takes its value from the shell .* not set; export",
        ),
        ({"OMP_NUM_THREADS": "many"}, False, r"OMP_NUM_THREADS = 'many' is not a whole number"),
        ({"OMP_NUM_THREADS": "0"}, True, r"OMP_NUM_THREADS = '0' is not a whole number above 0"),
        ({"LD_PRELOAD": "x.so"}, True, r"env LD_PRELOAD would be ignored: .* before the command"),
        ({"LD_PRELOAD": None}, False, r"env LD_PRELOAD without a value would be ignored"),
    ],
)
def test_a_variable_that_would_have_no_effect_is_refused(
    variables: dict[str, str | None], started: bool, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        values_of(variables, {"LD_PRELOAD": "y.so"}, started)
