"""Sharded checkpoints: several writers, any readers; verified and never lost, with real files and
real kills.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoray.checkpoint import files, sharded_files
from nanoray.checkpoint.files import Draft, load
from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.cli.checkpoint import main
from nanoray.errors import CheckpointError
from nanoray.machine.fault_points import SAVING, watch
from nanoray.parallel.pieces import Piece
from tests.harness.commands import forkserver, killed_saves
from tests.harness.saving import save

VIEWS = {
    "qkv": ((12, 4), (3, 4, 4)),
    "up": ((16, 4), None),
    "norm": ((4,), None),
    "emb": ((65, 4), None),
}
ALIAS = {"head": "emb"}


def full(step: int) -> dict[str, Tensor]:
    """Every parameter as it is after a step."""
    made = {}
    for i, (name, (shape, _)) in enumerate(VIEWS.items()):
        made[name] = (torch.arange(float(prod(shape))) * 1.37 + 100 * i + step).view(shape)
    return made


def moments(step: int) -> dict[str, Tensor]:
    both = {
        f"{key}.{name}": tensor * by
        for name, tensor in full(step).items()
        for key, by in (("m", 0.1), ("v", 7.0))
    }
    return both | {f"step.{name}": torch.tensor(float(step)) for name in VIEWS}


def cuts(mesh: str, ranks: int) -> list[dict[str, Piece]]:
    """Which piece of each parameter each rank owns: `even` and `uneven` flat ranges, rows, or one
    owner each.
    """
    held: list[dict[str, Piece]] = [{} for _ in range(ranks)]
    rng = random.Random(ranks)
    for i, (name, (shape, view)) in enumerate(VIEWS.items()):
        whole = Piece.whole(name, shape, view)
        n, unit = whole.numel, prod(whole.view[1:]) if mesh == "rows" else 1
        if mesh == "owners":
            held[i % ranks][name] = whole
            continue
        inner = sorted(rng.randrange(n + 1) for _ in range(ranks - 1))
        ends = (
            [*inner, n]
            if mesh == "uneven"
            else [min(n, -(-n // unit // ranks) * unit * r) for r in range(1, ranks)]
        )
        ends = ends if mesh == "uneven" else [*ends, n]
        for rank, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < end:
                held[rank][name] = whole.flat_range(begin, end)
    return held


def state_of(rank: int, held: dict[str, Piece], step: int) -> StateDict:
    """What one rank saves."""
    weights, optimizer = full(step), moments(step)
    own = {name: piece.take(weights[name]) for name, piece in held.items()}
    mine = {
        n: held[p].take(t)
        for n, t in optimizer.items()
        if (p := n.partition(".")[2]) in held and n[:4] != "step"
    }
    mine |= {f"step.{name}": optimizer[f"step.{name}"] for name in held}
    # A buffer, which no rank owns
    first = {"counter": torch.tensor([float(step)])} if rank == 0 else {}
    rng = (
        [{"cpu": torch.full((8,), step % 251, dtype=torch.uint8)} for _ in range(3)]
        if rank == 0
        else []
    )
    meta = {"step": step, "val_loss": None, "world_size": 3, "model_shape": {}}
    return StateDict(own | first, mine, rng, {"scale": 2.0}, meta, held, ALIAS)


def save_all(folder: Path, held: Sequence[dict[str, Piece]], step: int, keep: int = 9) -> Path:
    """Save as several ranks, one thread each."""
    states = [state_of(rank, of, step) for rank, of in enumerate(held)]
    draft = Draft(folder, step, "0", None)
    with draft.errors():
        draft.begin(1000)
    others = [
        threading.Thread(target=sharded_files.write, args=(draft.temp, rank, state))
        for rank, state in enumerate(states)
        if rank
    ]
    for thread in others:
        thread.start()
    try:
        files.save(draft, states[0], len(held), keep, lambda: None)
        return draft.final
    finally:
        for thread in others:
            thread.join()


def is_whole(state: StateDict, step: int) -> bool:
    wanted = full(step)
    wanted |= {"head": wanted["emb"], "counter": torch.tensor([float(step)])}
    right = state.model.keys() == wanted.keys() and all(
        torch.equal(state.model[n], t) for n, t in wanted.items()
    )
    adam = moments(step)
    right &= state.optimizer.keys() == adam.keys() and all(
        torch.equal(state.optimizer[n], t) for n, t in adam.items()
    )
    return right and state.meta["step"] == step and len(state.rng) == 3


MESHES = [*product(("even", "uneven", "rows"), (1, 2, 3, 5, 7)), ("owners", 2), ("owners", 3)]


# What `make test` saves with; each is loaded by all
EVERYDAY = (("even", 3), ("uneven", 5), ("rows", 2), ("owners", 3))


@pytest.mark.parametrize(
    "saved",
    [m if m in EVERYDAY else pytest.param(m, marks=pytest.mark.full) for m in MESHES],
    ids=lambda mesh: f"{mesh[0]}{mesh[1]}",
)
def test_any_mesh_loads_what_any_mesh_saved(tmp_path: Path, saved: tuple[str, int]) -> None:
    """Seventeen meshes to seventeen: whole, and each rank's pieces only."""
    path = save_all(tmp_path, cuts(*saved), 7)
    assert is_whole(load(path), 7)
    weights, adam = full(7), moments(7)
    for mesh in MESHES:
        for held in cuts(*mesh):
            state = load(path, held)
            assert all(torch.equal(state.model[name], tensor) for name, tensor in weights.items())
            wanted = {n: t for n, t in adam.items() if n.partition(".")[2] in held}
            assert state.optimizer.keys() == wanted.keys()
            for name, tensor in wanted.items():
                piece = held[name.partition(".")[2]]
                assert torch.equal(
                    state.optimizer[name], tensor if name[:4] == "step" else piece.take(tensor)
                )


def test_a_whole_state_loads_into_pieces(tmp_path: Path) -> None:
    weights = full(3) | {"head": full(3)["emb"], "counter": torch.ones(1)}
    path = save(tmp_path, StateDict(weights, moments(3), [], {}, {"step": 3}, None, ALIAS), keep=1)
    assert load(path).optimizer.keys() == moments(3).keys()
    for held in cuts("uneven", 3):
        state = load(path, held, held)
        assert state.model.keys() == weights.keys()
        assert torch.equal(state.model["counter"], torch.ones(1))
        assert {name.partition(".")[2] for name in state.optimizer} == held.keys()
        for name, piece in held.items():
            assert torch.equal(state.model[name], piece.take(weights[name]))
            assert torch.equal(state.optimizer[f"m.{name}"], piece.take(moments(3)[f"m.{name}"]))
            assert state.optimizer[f"step.{name}"] == 3


def test_a_rank_reads_no_file_that_has_nothing_for_it(tmp_path: Path) -> None:
    held = cuts("owners", 3)
    path = save_all(tmp_path, held, 1)
    (path / "optimizer-00001.safetensors").write_bytes(
        # The size is compared, the rest not read
        b"x" * (path / "optimizer-00001.safetensors").stat().st_size
    )
    load(path, held[0])
    with pytest.raises(CheckpointError, match=r"optimizer-00001.safetensors: sha256 differs"):
        load(path, held[1])
    with pytest.raises(CheckpointError, match=r"optimizer-00001.safetensors: sha256 differs"):
        load(path)


def test_flipped_bits_and_truncations_are_detected(tmp_path: Path) -> None:
    path = save_all(tmp_path, cuts("uneven", 3), 5)
    names = sorted(p.name for p in path.iterdir())
    assert names == [
        "manifest.json",
        *(f"model-0000{r}.safetensors" for r in range(3)),
        *(f"optimizer-0000{r}.safetensors" for r in range(3)),
        "rng.safetensors",
        "state.json",
    ]
    rng = random.Random(0)
    missed = []
    for name in names:
        good = (path / name).read_bytes()
        for _ in range(12):
            data = bytearray(good)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(data)
            missed += [name] if valid(path) else []
        for length in (0, 8, len(good) - 1, rng.randrange(len(good))):
            (path / name).write_bytes(good[:length])
            missed += [(name, length)] if valid(path) else []
        (path / name).unlink()
        missed += [(name, "gone")] if valid(path) else []
        (path / name).write_bytes(good)
    assert missed == []
    assert valid(path)


def valid(path: Path) -> bool:
    try:
        load(path)
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c["pieces"].pop(), "manifest.json: not as nanoray writes it"),
        (
            lambda c: c["pieces"][0]["up"].update(boxes=[[[0, 1], [0, 4]]]),
            "state.json: not as nanoray writes it",
        ),
        (
            lambda c: c["pieces"][0]["up"].update(view=[8, 8]),
            "state.json: not as nanoray writes it",
        ),
        (lambda c: c["aliases"].update(head="nobody"), "state.json: not as nanoray writes it"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict], object], text: str
) -> None:
    """Even with the right sums: what is missing must not be filled with what was in memory."""
    path = save_all(tmp_path, cuts("even", 2), 5)
    content = json.loads((path / "state.json").read_text())
    change(content)
    (path / "state.json").write_text(json.dumps(content))
    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / "state.json").read_bytes()
    manifest["files"]["state.json"] = {
        "bytes": len(data),
        "sha256": __import__("hashlib").sha256(data).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match=text):
        load(path)


def test_a_part_that_fails_leaves_the_older_checkpoint_and_names_the_rank(tmp_path: Path) -> None:
    held = cuts("even", 2)
    save_all(tmp_path, held, 1)
    draft = Draft(tmp_path, 2, "0", None)
    draft.begin(1000)
    (draft.temp / "model-00001.safetensors").mkdir()  # rank 1 cannot write its file
    with pytest.raises(OSError, match="File exists"):
        sharded_files.write(draft.temp, 1, state_of(1, held[1], 2))
    with pytest.raises(
        CheckpointError, match=r"cannot write a part of .*: rank 1: File exists \(model-00001"
    ):
        files.save(draft, state_of(0, held[0], 2), 2, 9, lambda: None)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_rank_that_never_writes_ends_the_wait_when_the_run_says_so(tmp_path: Path) -> None:
    held = cuts("even", 2)
    save_all(tmp_path, held, 1)
    draft = Draft(tmp_path, 2, "0", None)
    draft.begin(1000)
    asked = []

    def alive() -> None:
        asked.append(time.monotonic())
        if len(asked) > 3:
            raise CheckpointError("rank 1 was lost")

    with pytest.raises(CheckpointError, match="rank 1 was lost"):
        files.save(draft, state_of(0, held[0], 2), 2, 9, alive)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert is_whole(load(tmp_path / "step_00000001"), 1)


def test_the_command_lists_verifies_and_exports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_all(tmp_path / "checkpoints", cuts("uneven", 3), 5)
    assert main(["list", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step_00000005  ok" in out
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "weights.safetensors")]) == 0
    exported, wanted = load_file(tmp_path / "weights.safetensors"), full(5)
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())
    (path / "optimizer-00002.safetensors").write_bytes(b"short")
    assert main(["verify", str(tmp_path)]) == 1


def save_forever(folder: Path, done) -> None:  # type: ignore[no-untyped-def]
    found, _ = newest_valid(folder)
    step = found.state.meta["step"] if found else 0
    held = cuts("uneven", 3)
    while True:
        step += 10
        for _ in range(2):  # the second replaces the first
            save_all(folder, held, step, keep=2)
            done.value = step


@pytest.mark.slow
def test_sigkill_at_any_time_loses_nothing(tmp_path: Path) -> None:
    for done in killed_saves(tmp_path, save_forever, tmp_path):
        found, notes = newest_valid(tmp_path)
        assert found
        step = found.state.meta["step"]
        assert step in (done, done + 10)  # committed but not yet told
        assert is_whole(found.state, step)
        assert notes == []


def die_at(point: str, folder: Path, ranks: int) -> None:
    """Save a step that is on disk already, and die without a trace at a point of that."""
    watch(lambda name: os._exit(9) if name == point else None)
    save_all(folder, cuts("uneven", ranks), 20, keep=2)


@pytest.mark.parametrize("point", SAVING)
def test_a_death_at_each_point_of_a_save_loses_nothing(tmp_path: Path, point: str) -> None:
    """Three ranks write their parts. Test_checkpoint has a death before each system call of one."""
    held = cuts("uneven", 3)
    for step in (10, 20):
        save_all(tmp_path, held, step, keep=2)
    process = forkserver.Process(target=die_at, args=(point, tmp_path, 3), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 9, "it was not reached"

    found, notes = newest_valid(tmp_path)
    assert found
    assert notes == []
    assert is_whole(found.state, 20)
    # The next save puts back what lay aside, and removes the draft.
    save_all(tmp_path, held, 30, keep=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_000000{step}" for step in (10, 20, 30)
    ]


def test_a_part_left_out_of_the_manifest_is_damage(tmp_path: Path) -> None:
    path = save_all(tmp_path, cuts("even", 3), 5)
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("model-00001.safetensors", "optimizer-00001.safetensors"):
        del manifest["files"][name]
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match=r"manifest.json: not as nanoray writes it"):
        load(path)
    assert os.listdir(path)
    assert files.MANIFEST == "manifest.json"
