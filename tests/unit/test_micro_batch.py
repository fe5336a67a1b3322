"""`micro_batch_size auto`: what it goes with, and which size a search takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.config import Batch, batch_for, make_config, micro_batches, resolve_batch
from nanoray.config.layers import load_config
from nanoray.errors import ConfigError
from nanoray.train.arm import BlockCost
from nanoray.train.micro_batch import (
    BUDGET_S,
    STOPPED,
    DoesNotFit,
    FoundSize,
    fastest,
    next_size,
    of_file,
    predicted,
    related,
    remember,
    search,
)

AUTO = {"micro_batch_size": "auto", "global_batch_size": 24}


# What is asked.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 0}, "auto divides a global batch, and there is none; give global"),
        ({"grad_accum_steps": 2}, "auto with grad_accum_steps = 2: accumulation follows from the"),
        ({"model": "resnet"}, "auto with model = resnet: its batch norms take mean and variance"),
        ({"model": "own", "sync_batchnorm": True}, "auto with sync_batchnorm = True: mean and"),
    ],
)
def test_what_it_does_not_go_with(values: dict[str, Any], message: str) -> None:
    make_config(AUTO)
    with pytest.raises(ConfigError, match=message) as error:
        make_config(AUTO | values)
    assert "\n" not in str(error.value)


def test_a_recipe_without_a_global_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("micro_batch_size: 4\ngrad_accum_steps: 2\n")
    flags = ["--config", str(file), "--micro_batch_size", "auto"]
    with pytest.raises(ConfigError, match="and there is none; give global_batch_size"):
        parse_args(flags, "prog", "what")
    found = parse_args([*flags, "--global_batch_size", "8"], "prog", "what")
    assert found.config.micro_batch_search
    assert ("micro_batch_search", True, "flag") in found.chosen()


def test_a_number_replaces_auto_and_auto_a_number(tmp_path: Path) -> None:
    run = tmp_path / "config.json"
    run.write_text(make_config(AUTO).to_json())
    assert load_config(str(run)) == make_config(AUTO)
    number = parse_args(["--resume", str(tmp_path), "--micro_batch_size", "4"], "prog", "what")
    assert (number.config.micro_batch_size, number.config.micro_batch_search) == (4, False)
    run.write_text(make_config(AUTO | {"micro_batch_size": 4}).to_json())
    again = parse_args(["--resume", str(tmp_path), "--micro_batch_size", "auto"], "prog", "what")
    assert (again.config.micro_batch_size, again.config.micro_batch_search) == (0, True)


def test_the_sizes_are_those_into_which_a_share_divides() -> None:
    config = make_config(AUTO)
    assert resolve_batch(config, 2) == Batch(12, 1, 2)
    assert micro_batches(config, 12) == [1, 2, 3, 4, 6, 12]
    # An interleaved pipeline takes its micro batches in groups of pp
    config = make_config(AUTO | {"pp": 2, "pp_schedule": "interleaved", "n_layer": 4})
    assert resolve_batch(config, 1) == Batch(12, 2, 1)
    assert micro_batches(config, 24) == [1, 2, 3, 4, 6, 12]
    for micro in micro_batches(config, 24):
        assert batch_for(config, 1, 1, micro) == Batch(micro, 24 // micro, 1)


# The search, on a device of known speed and memory.


class Device:
    """Measures sizes by two functions, and notes which ones."""

    def __init__(
        self, seconds: Callable[[int], float], peak: Callable[[int], int], has: int = 10**9
    ) -> None:
        self._seconds = seconds
        self._peak = peak
        self._has = has
        self.tried: list[int] = []

    def measure(self, micro: int) -> BlockCost:
        self.tried.append(micro)
        if self._peak(micro) > self._has:
            raise DoesNotFit("ran out of memory")
        return BlockCost(self._seconds(micro), self._peak(micro), 0.0, 2)


SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]


def overhead(micro: int) -> float:
    """Each micro batch costs something beside its samples."""
    return 48 * 0.001 + 48 / micro * 0.01


def test_larger_is_faster_until_memory_ends() -> None:
    device = Device(overhead, lambda micro: 100 + 10 * micro)
    found = search(SIZES, device.measure, room=275, samples=48)
    assert found.micro == 16
    # 1 once more for what a first arm loads, then upwards; 24 would need 340
    assert device.tried[:6] == [1, 1, 2, 4, 8, 16]
    assert set(device.tried[6:]) == {16, 8, 4}
    assert "24 would take 0.00 of 0.00 GB" in found.why
    # A size between two doublings, where it still fits
    device = Device(overhead, lambda micro: 100 + 10 * micro)
    assert search(SIZES, device.measure, room=225, samples=48).micro == 12


def test_all_of_a_share_is_the_largest() -> None:
    device = Device(overhead, lambda micro: 100 + 10 * micro)
    found = search(SIZES, device.measure, room=10**6, samples=48)
    assert found.micro == 48
    assert "48 is all that a rank has" in found.why


def test_the_smallest_of_those_that_are_as_fast() -> None:
    """Within 2 %: 4 is 1.9 % slower than 16, and 2 is 5 %."""
    seconds = {1: 2.0, 2: 1.05, 4: 1.019, 8: 1.01, 16: 1.0}
    device = Device(lambda micro: seconds[micro], lambda micro: micro)
    assert search([*seconds], device.measure, room=100, samples=16).micro == 4
    assert fastest({4: [1.021], 16: [1.0]}) == 16
    assert fastest({4: [1.019], 16: [1.0]}) == 4
    assert fastest({4: [0.9, 1.1, 1.1], 16: [1.0, 1.0, 1.0]}) == 16, "medians"


def test_sizes_that_get_slower_end_the_search() -> None:
    """As where a cache is full: two in a row, since one may be noise."""
    seconds = {1: 1.0, 2: 0.8, 4: 1.2, 8: 0.7, 16: 0.9, 32: 1.0, 64: 0.1}
    device = Device(lambda micro: seconds[micro], lambda micro: micro)
    found = search([*seconds], device.measure, room=1000, samples=64)
    assert found.micro == 8
    assert 64 not in device.tried
    assert "larger ones are slower" in found.why


def test_a_size_that_runs_out_of_memory_is_the_end_and_not_the_answer() -> None:
    """Memory that is no line: the room was thought to be larger than it is."""
    device = Device(overhead, lambda micro: 100 + 10 * micro, has=185)
    found = search(SIZES, device.measure, room=10**6, samples=48)
    assert found.micro == 8
    assert device.tried.count(16) == 1
    assert "16 ran out of memory" in found.why


def test_long_steps_are_not_measured_for_ever() -> None:
    device = Device(lambda micro: BUDGET_S / 10, lambda micro: micro)
    found = search(SIZES, device.measure, room=10**6, samples=48)
    assert len(device.tried) < 6
    assert "of steps are spent" in found.why


def test_a_stop_ends_the_search_with_what_is_known() -> None:
    asked = iter([False, False, True])
    device = Device(overhead, lambda micro: micro)
    found = search(SIZES, device.measure, 10**6, 48, lambda: next(asked))
    assert device.tried == [1, 1, 2, 4]
    assert found.micro == 4
    assert STOPPED in found.why


def test_memory_is_a_line_through_the_two_largest() -> None:
    assert predicted({1: 110, 2: 120, 4: 150}, 8) == 210
    assert predicted({1: 110}, 2) == 220, "a bound"
    assert predicted({1: 120, 2: 110}, 8) == 110, "noise is no slope below 0"
    assert next_size(SIZES, {1: 110}, room=130) == 2, "the second point of the line"
    assert next_size([1, 7], {1: 110}, room=700) is None
    assert next_size(SIZES, {1: 110, 2: 120}, room=129) is None


# What is kept.


def test_a_measurement_is_kept_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "sizes.json"
    assert of_file(path, "a") is None
    remember(path, "a", FoundSize(4, "because"), {"torch": "2"})
    remember(path, "b", FoundSize(8, "because"), {"torch": "3"})
    found = of_file(path, "a")
    assert found
    assert found.micro == 4
    assert str(path) in found.why
    assert of_file(path, "c") is None


def test_what_it_holds_for() -> None:
    config = make_config(AUTO)

    def same(**other: Any) -> bool:
        changed = make_config(AUTO | other)
        return related(changed.model_dump()) == related(config.model_dump())

    assert same(lr=0.1, max_steps=7, warmup_steps=3, eval_every=9, name="other")
    for key, value in {
        "n_embd": 64,
        "block_size": 32,
        "optimizer": "sgd",
        "compile": True,
        "dp_mode": "zero1",
        "activation_checkpointing": "block",
        "global_batch_size": 12,
        "dropout": 0.1,
        "attention": "plain",
    }.items():
        assert not same(**{key: value}), key
