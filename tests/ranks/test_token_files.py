"""Token files of other tools train: on one rank and on two, and a resume changes no bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.sample import main as sample
from nanoray.train import rank as one_rank
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.ranks import make_spec, series
from tests.harness.token_files import write_bare, write_llmc

SETTINGS: dict[str, Any] = {"max_steps": 4, "eval_every": 2, "sample_tokens": 6}


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, LastingRanks]]:
    with LastingRanks(1) as alone, LastingRanks(2) as pair:
        yield {1: alone, 2: pair}


def train(ranks: LastingRanks, spec: RunSpec) -> dict[str, Any]:
    outcomes = ranks.train(spec, one_rank.train)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return outcomes[0]


def losses(spec: RunSpec) -> list[dict[int, float]]:
    return [series(spec, key) for key in ("train/loss", "train/grad_norm", "val/loss")]


def bare(folder: Path, text: str) -> None:
    """One file for each split, without a header, and the characters in meta.json."""
    chars = sorted(set(text))
    ids = [chars.index(char) for char in text]
    cut = int(len(ids) * 0.9)
    write_bare(folder / "train.bin", ids[:cut])
    write_bare(folder / "val.bin", ids[cut:])
    meta = {"dtype": "uint16", "tokenizer": {"kind": "char", "chars": "".join(chars)}}
    (folder / "meta.json").write_text(json.dumps(meta))


def llmc(folder: Path, text: str) -> None:
    """GPT-2's tokens, which a header announces; nothing else is in the folder."""
    ids = np.random.default_rng(0).zipf(1.3, 3000) % 50_257
    write_llmc(folder / "tiny_shakespeare_train.bin", ids[:2600])
    write_llmc(folder / "tiny_shakespeare_val.bin", ids[2600:])


def shards(folder: Path, text: str) -> None:
    """More files than windows that fit into one, of the same tokens as `bare`."""
    chars = sorted(set(text))
    ids = [chars.index(char) for char in text]
    cut = int(len(ids) * 0.9)
    for number, start in enumerate(range(0, cut, 700)):
        write_llmc(
            folder / f"fineweb_train_{number + 1:06d}.bin", ids[start : min(start + 700, cut)]
        )
    write_llmc(folder / "fineweb_val_000000.bin", ids[cut:])
    (folder / "meta.json").write_text(json.dumps({"vocab_size": len(chars)}))


KINDS = (bare, llmc, shards)


@pytest.mark.full
def test_token_files_of_other_tools_train_and_resume(
    text: Path, tmp_path: Path, ranks: dict[int, LastingRanks], capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, dict[int, list[dict[int, float]]]] = {}
    for write in KINDS:
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(folder, text.read_text()[:20_000])
        found[write.__name__] = {}
        for world in (1, 2):
            out = tmp_path / f"{write.__name__}-{world}"
            whole = make_spec(folder, out / "whole", **SETTINGS)
            outcome = train(ranks[world], whole)
            found[write.__name__][world] = losses(whole)
            assert len(series(whole)) == 4
            if write is not llmc:  # without tiktoken's file GPT-2's tokens have no text
                assert outcome["sample"]

            # A resume in the middle.
            train(ranks[world], make_spec(folder, out / "parts", **SETTINGS, stop_at=2))
            rest = make_spec(folder, out / "parts", **SETTINGS, resume="auto")
            assert train(ranks[world], rest)["resumed_from"].endswith("step_00000002")
            assert losses(rest) == losses(whole), write.__name__

        # One rank and two: the same samples, summed in another order.
        for one, two in zip(*found[write.__name__].values(), strict=True):
            assert one.keys() == two.keys()
            assert list(one.values()) == pytest.approx(list(two.values()), abs=2e-5)

    # The same tokens in one file or in several, with or without headers: no bit differs.
    assert found["shards"] == found["bare"]
    assert found["llmc"] != found["bare"]

    # The characters of meta.json come back in the text of a sample.
    newest = next((tmp_path / "bare-2" / "whole").glob("*/"))
    assert sample([str(newest), "--prompt", "abc ", "--max_new_tokens", "8"]) == 0
    written = capsys.readouterr().out
    assert written.startswith("abc ")
    assert len(written.rstrip("\n")) == 12
