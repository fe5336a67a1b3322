"""Checkpoints: bit-exact, verified, and never lost; with real files, real kills and real full
disks.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from nanoray.checkpoint import tensorfile
from nanoray.checkpoint.files import load
from nanoray.checkpoint.manifest import manifest_json, parse_manifest
from nanoray.checkpoint.resume import check_shape, find_resume, newest_valid
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.errors import CheckpointError
from tests.harness.commands import forkserver, killed_saves
from tests.harness.messages import find_line
from tests.harness.saving import save

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "vocab_size": 65}
FILES = [
    "manifest.json",
    "model-00000.safetensors",
    "optimizer-00000.safetensors",
    "rng.safetensors",
    "state.json",
]
DTYPES = [*tensorfile.DTYPES.values()]


def fork(target, *args):
    """Start a process from one that has imported torch once: real processes to kill, without 3 s
    each.
    """
    process = forkserver.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def make(step, numel=64, **meta):
    """A state whose every value follows from `step`."""
    values = torch.arange(numel, dtype=torch.float32) + step
    shape = {"model_shape": SHAPE, "config": {k: v for k, v in SHAPE.items() if k != "vocab_size"}}
    return StateDict(
        model={"wte": values, "bias": -values[:3]},
        optimizer={"exp_avg.wte": values / 3, "step.wte": torch.tensor(float(step))},
        rng=[{"torch": torch.full((16,), step % 251, dtype=torch.uint8)}, {}],
        scaler={"scale": 65536.0},
        meta={"step": step, "samples_seen": 12 * step, **shape, **meta},
    )


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).tolist(),
    )


def same(a, b):
    def flat(state):
        return [
            {k: bits(v) for k, v in d.items()} for d in (state.model, state.optimizer, *state.rng)
        ]

    return flat(a) == flat(b) and a.scaler == b.scaler and a.meta == b.meta


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path, at=-1, bit=1):
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------------ round trips


def test_roundtrip_is_bit_exact(tmp_path):
    generator = torch.Generator().manual_seed(1)
    # Any bits, so NaNs too
    raw = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=generator)
    tensors = {}
    for dtype in DTYPES:
        values = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
        tensors |= {
            f"odd.{dtype}": values[:15].reshape(3, 5),
            f"scalar.{dtype}": values[0],
            f"none.{dtype}": values[:0],
        }
        tensors |= {
            f"transposed.{dtype}": values[:12].reshape(3, 4).t(),
            f"strided.{dtype}": values[1:12:3],
        }
    tied = torch.randn(7, 3, generator=generator, requires_grad=True)
    tensors |= {
        "wte": tied,
        "lm_head": tied,
        "expanded": tied[0].expand(4, 3),
        "no.rows": torch.empty(0, 3),
    }
    rng = [{"torch": torch.get_rng_state(), "numpy.mt": raw}, {}, {"torch": raw[:1]}]
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2.0**0.5]
    state = StateDict(
        tensors, {"step.x": torch.tensor(7.0)}, rng, {"scale": 2.0**16, "growth": 0.1}, {}
    )
    state.meta = {
        "step": 3,
        "floats": floats,
        "text": 'ü"\n\x00',
        "nested": {"a": [None, True, 2**70]},
        "best": None,
    }

    path = save(tmp_path / "new" / "checkpoints", state, keep=1)

    assert path.name == "step_00000003"
    assert names(path) == FILES
    back = load(path)
    assert same(back, state)
    assert [math.copysign(1, x) for x in back.meta["floats"]] == [
        math.copysign(1, x) for x in floats
    ]
    theirs = load_file(path / "model-00000.safetensors")
    assert {k: bits(v) for k, v in theirs.items()} == {k: bits(v) for k, v in tensors.items()}
    assert len(load_file(path / "rng.safetensors")) == 3


@pytest.mark.parametrize("numel", [0, 1, 1000, 1024, 1025, 3000])
@pytest.mark.parametrize("refused", [False, True])
def test_direct_writes_leave_the_same_bytes(tmp_path, monkeypatch, numel, refused):
    """In blocks from aligned memory; also where the file system refuses them at the first write."""
    monkeypatch.setattr(tensorfile, "CHUNK", 4096)
    state = make(1, numel=numel)
    sums = json.loads((save(tmp_path / "cached", state, keep=1) / "manifest.json").read_text())

    write, direct = os.write, []

    def watch(fd, data):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(len(data))
            if refused:
                raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(tensorfile, "DIRECT_SIZE", 1)
    monkeypatch.setattr(os, "write", watch)
    path = save(tmp_path / "direct", state, keep=1)
    assert json.loads((path / "manifest.json").read_text()) == sums
    assert same(load(path), state)
    assert set(direct) <= {4096}
    with open(tmp_path / "probe", "wb") as probe:
        supported = tensorfile.set_direct(probe.fileno(), True)
    assert bool(direct) == (supported and numel >= 1000)


def test_manifest_sums_are_those_of_the_files(tmp_path):
    path = save(tmp_path, make(1), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 2
    for name in FILES[1:]:
        data = (path / name).read_bytes()
        assert manifest["files"][name] == {
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }


def test_numbers_of_the_meta_that_are_not_finite_become_null(tmp_path):
    path = save(tmp_path, make(1, loss=[math.nan, math.inf, 1.5]), keep=1)
    assert load(path).meta["loss"] == [None, None, 1.5]


# ----------------------------------------------------------------------------------------------------------- damage


def detected(path):
    """The text that loading a damaged checkpoint raises, or None."""
    try:
        load(path)
    except CheckpointError as error:
        return str(error)
    return None


def test_flipped_bits_in_each_file_are_detected(tmp_path):
    path = save(tmp_path, make(1), keep=1)
    rng = random.Random(0)
    places = [
        (name, rng.randrange((path / name).stat().st_size), 1 << rng.randrange(8))
        for name in FILES * 20
    ]
    places += [
        ("manifest.json", at, 1 << rng.randrange(8))
        for at in range((path / "manifest.json").stat().st_size)
    ]
    texts = {}
    for name, at, bit in places:
        good = (path / name).read_bytes()
        flip(path / name, at, bit)
        texts[name, at, bit] = detected(path)
        (path / name).write_bytes(good)
    assert [place for place, text in texts.items() if not text or "is damaged" not in text] == []
    assert len(texts) >= 100
    assert detected(path) is None


def test_truncations_of_each_file_are_detected(tmp_path):
    path = save(tmp_path, make(1), keep=1)
    rng = random.Random(0)
    texts = {}
    for name in FILES:
        good = (path / name).read_bytes()
        for length in [0, 1, 7, 8, len(good) - 1, *(rng.randrange(len(good)) for _ in range(6))]:
            (path / name).write_bytes(good[:length])
            texts[name, length] = detected(path)
        (path / name).write_bytes(good)
    assert [place for place, text in texts.items() if not text or place[0] not in text] == []
    assert len(texts) >= 50
    assert detected(path) is None


def reseal(path, name):
    """Give a changed file a manifest that agrees with it."""
    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))


def relisted(manifest, without="", more=""):
    """The bytes of a manifest that lists other files, as nanoray would write it."""
    sums = parse_manifest(manifest.read_bytes())
    sums.pop(without, None)
    if more:
        sums[more] = sums["model-00000.safetensors"]
    return manifest_json(sums)


def break_it(path, how):
    model, manifest = path / "model-00000.safetensors", path / "manifest.json"
    if how == "missing":
        model.unlink()
    elif how == "folder":
        model.unlink()
        model.mkdir()
    elif how == "short":
        model.write_bytes(model.read_bytes()[:-3])
    elif how == "flipped":
        flip(model)
    elif how == "no manifest":
        manifest.unlink()
    elif how == "not json":
        manifest.write_bytes(b"\xff{")
    elif how == "nested":
        manifest.write_bytes(b"[" * 100_000)
    elif how == "format":
        manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))
    elif how == "unlisted":
        manifest.write_text('{"format": 2, "files": {}}')
    elif how == "one unlisted":
        manifest.write_bytes(relisted(manifest, without="optimizer-00000.safetensors"))
    elif how == "one more":
        manifest.write_bytes(relisted(manifest, more="more.safetensors"))
        shutil.copy(model, path / "more.safetensors")
    elif how == "foreign":
        model.write_bytes(b"\xff" * 16)
        reseal(path, "model-00000.safetensors")
    elif how == "foreign state":
        (path / "state.json").write_text("{}")
        reseal(path, "state.json")


DAMAGE = {
    "missing": r"model-00000.safetensors: missing",
    "short": r"model-00000.safetensors: \d+ bytes instead of \d+",
    "flipped": r"model-00000.safetensors: sha256 differs",
    "no manifest": r"manifest.json: missing",
    "not json": r"manifest.json: not as nanoray writes it",
    "format": r"manifest.json: not as nanoray writes it",
    "one unlisted": r"manifest.json: not as nanoray writes it",
    "one more": r"manifest.json: not as nanoray writes it",
    "foreign": r"model-00000.safetensors: not as nanoray writes it",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_and_the_previous_one_is_used(tmp_path, how):
    save(tmp_path, make(100), keep=3)
    newest = save(tmp_path, make(200), keep=3)
    break_it(newest, how)

    text = rf"^checkpoint {newest} is damaged \({DAMAGE[how]}\); remove it, or --resume its run folder to use an older"
    with pytest.raises(CheckpointError, match=text):
        load(newest)
    found, notes = newest_valid(tmp_path)
    assert found.path.name == "step_00000100"
    assert same(found.state, make(100))
    assert len(notes) == 1
    assert notes == found.notes
    assert notes[0].startswith("checkpoint step_00000200 is damaged (")
    assert notes[0].endswith("); using step_00000100")
    # Training goes on from 100, saves 200 again, and that one is good.
    save(tmp_path, make(200), keep=3)
    assert same(newest_valid(tmp_path)[0].state, make(200))
    assert names(tmp_path) == ["step_00000100", "step_00000200"]


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_planted_pickle_is_never_executed(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    path = save(tmp_path / "c", make(1), keep=1)
    for name in (".metadata", "model.pt", "optimizer.pkl"):  # beside the files: ignored
        (path / name).write_bytes(bomb)
    load(path)
    for name in FILES:  # instead of a file, even with the right sum: refused
        copy = shutil.copytree(path, tmp_path / name)
        (copy / name).write_bytes(bomb)
        if name != "manifest.json":
            reseal(copy, name)
        with pytest.raises(
            CheckpointError, match=f"is damaged \\({name}: not as nanoray writes it"
        ):
            load(copy)
    assert not (tmp_path / "executed").exists()
    pickle.loads(bomb)
    assert (tmp_path / "executed").exists()  # the bomb was live


# ------------------------------------------------------------------------------------------------- kept and removed


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    losses = {10: 3.0, 20: None, 30: 1.5, 40: math.nan, 50: 1.5, 60: 2.0, 70: 1.9}
    kept = {}
    for step, loss in losses.items():
        save(tmp_path, make(step, val_loss=loss), keep=2)
        kept[step] = [int(name[5:]) for name in names(tmp_path)]
    assert kept == {
        10: [10],
        20: [10, 20],
        30: [20, 30],
        40: [30, 40],
        50: [40, 50],
        60: [50, 60],
        70: [50, 60, 70],
    }


def test_leftovers_of_dead_attempts_are_removed_before_space_is_measured(tmp_path, monkeypatch):
    save(tmp_path, make(10), keep=1)
    for name in (
        ".tmp-step_00000020-2-4711",
        ".del-step_00000010--7",
        ".old-step_00000010-a.b_c-1",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00000.safetensors").write_bytes(b"x" * 99)
    seen = []
    statvfs = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: (seen.extend(names(tmp_path)), statvfs(path))[1]
    )
    save(tmp_path, make(20), keep=2, attempt="3/é")
    assert seen == ["step_00000010"]
    assert names(tmp_path) == ["step_00000010", "step_00000020"]


# --------------------------------------------------------------------------------------------- full disks and kills


def test_disk_full_is_seen_before_writing(tmp_path, monkeypatch):
    save(tmp_path, make(10), keep=1)
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks = 50, 4096, real.f_blocks

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(
        CheckpointError,
        match=r"^cannot write checkpoint step_00000020 in .*: disk full: need 0\.80 MB and "
        r"0\.07 MB for manifest and rounding, have 0\.20 MB \(.*\); free "
        r"space, raise the limit or lower keep_checkpoints, or set another out_dir; older "
        r"checkpoints are untouched$",
    ):
        save(tmp_path, make(20, numel=100_000), keep=1)
    assert names(tmp_path) == ["step_00000010"]
    assert same(load(tmp_path / "step_00000010"), make(10))
    save(tmp_path, make(20), keep=1)  # a small one fits


@pytest.mark.parametrize(
    ("call", "times"), [("write", 10), ("fsync", 7), ("rename", 2), ("mkdir", 2)]
)
@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "disk"), KeyboardInterrupt()])
def test_every_failing_system_call_leaves_the_old_set(tmp_path, monkeypatch, call, times, error):
    """The n-th call fails, for every n; the same step is there already, so renames set it aside."""
    if call == "mkdir" and sys.version_info < (3, 11):
        pytest.skip(
            "pathlib of Python 3.10 calls the os.mkdir of its import, which no test replaces"
        )
    save(tmp_path, make(10), keep=1)
    real, texts = getattr(os, call), []
    for n in range(times):
        count = iter(range(99))

        def fail(*args, count=count, n=n, **kwargs):
            if next(count) == n:
                raise error
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                save(tmp_path, make(10), keep=1)
            except (CheckpointError, KeyboardInterrupt) as raised:
                texts.append(str(raised))
        assert next(count) > n  # the fault fired
        assert names(tmp_path) == ["step_00000010"]
        assert same(load(tmp_path / "step_00000010"), make(10))
    assert len(texts) >= times - 1  # the folder is there already: that mkdir may fail
    if isinstance(error, OSError):
        remedy = "; check the disk and permissions, or set another out_dir; older checkpoints are untouched"
        assert all("Input/output error (" in text and remedy in text for text in texts)


def die_at(folder, step, deadly):
    """Save, and die without a trace just before the `deadly`-th system call that changes the disk."""
    count = iter(range(9999))

    def guard(module, name):
        real = getattr(module, name)

        def call(*args, **kwargs):
            if next(count) == deadly:
                os._exit(9)
            return real(*args, **kwargs)

        setattr(module, name, call)

    for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        guard(os, name)
    save(folder, make(step), keep=1)


@pytest.mark.slow
def test_death_before_any_system_call_loses_nothing(tmp_path):
    """Even when the only checkpoint is being replaced by one of the same step."""
    aside = 0
    for n in range(99):
        folder = tmp_path / str(n)
        save(folder, make(10), keep=1)
        process = fork(die_at, folder, 10, n)
        process.join()
        aside += (
            any(name.startswith(".old") for name in names(folder))
            and not (folder / "step_00000010").exists()
        )
        found, notes = newest_valid(folder)
        assert same(found.state, make(10)), n
        assert notes == []
        save(folder, make(10), keep=1)
        assert names(folder) == ["step_00000010"]
        if process.exitcode == 0:
            break
    assert n >= 15
    assert aside == 1


def save_forever(folder, done):
    found, _ = newest_valid(folder)
    step = found.state.meta["step"] if found else 0
    while True:
        step += 10
        for _ in range(2):  # the second replaces the first
            save(folder, make(step, numel=50_000), keep=2, attempt=str(os.getpid()))
            done.value = step


@pytest.mark.slow
@pytest.mark.full  # tests/ranks/test_writer.py kills saves beside training
def test_sigkill_at_any_time_loses_nothing(tmp_path):
    for done in killed_saves(tmp_path, save_forever, tmp_path):
        found, notes = newest_valid(tmp_path)
        step = found.state.meta["step"]
        assert step in (done, done + 10)  # committed but not yet told
        assert same(found.state, make(step, numel=50_000))
        assert notes == []


# ----------------------------------------------------------------------------------------------------------- resume


def run(out_dir, name, *steps, **meta):
    for step in steps:
        save(out_dir / name / "checkpoints", make(step, **meta), keep=9)
    return out_dir / name


OTHER = SHAPE | {"n_layer": 6}


def test_find_run_auto(tmp_path):
    assert find_resume(tmp_path, "none", SHAPE) is None
    assert find_resume(tmp_path / "nowhere", "auto", SHAPE) is None
    assert find_resume(tmp_path, "auto", SHAPE) is None
    second = run(tmp_path, "2026-01-02_030405_gpt-2", 5, 10)
    run(tmp_path, "2026-01-02_030405_gpt", 90)
    run(tmp_path, "2025-12-31_235959_zzz", 99)
    run(tmp_path, "notes", 99)
    (tmp_path / "2026-09-09_000000_empty").mkdir()
    (tmp_path / "2026-09-09_000001_file").write_text("")
    found = find_resume(tmp_path, "auto", SHAPE)
    assert (found.run_dir, found.path, found.notes) == (
        second,
        second / "checkpoints" / "step_00000010",
        [],
    )
    assert same(found.state, make(10))

    # A newer run of another shape, and one whose every checkpoint is damaged, are skipped and
    # named.
    run(tmp_path, "2026-02-01_000000_wide", 50, model_shape=OTHER)
    broken = run(tmp_path, "2026-03-01_000000_broken", 50)
    flip(broken / "checkpoints" / "step_00000050" / "model-00000.safetensors")
    found = find_resume(tmp_path, "auto", SHAPE)
    assert found.run_dir == second
    broken, wide = found.notes
    damage = "model-00000.safetensors: sha256 differs"
    find_line(broken, "2026-03-01_000000_broken", "step_00000050", damage, "no older")
    find_line(wide, "2026-02-01_000000_wide", "another model", "n_layer is 6 there and 2 here")
    assert find_resume(tmp_path, "auto", OTHER).run_dir.name == "2026-02-01_000000_wide"


def described(run_dir, started=None, tokens="t", **config):
    """A run's config.json and run.json as far as --resume auto reads them."""
    (run_dir / "config.json").write_text(json.dumps(config))
    record = {"dataset": {"tokens_sha256": tokens}} | ({"started": started} if started else {})
    (run_dir / "run.json").write_text(json.dumps(record))
    return run_dir


def test_find_run_auto_takes_no_other_experiment(tmp_path):
    """Two runs of one shape. The newest is of another learning rate, and one is of another text."""
    mine = {"name": "lr1", "lr": 1e-3, "tokens_sha256": "t"}
    first = described(
        run(tmp_path, "2026-01-02_030405_lr1", 5), 100.0, name="lr1", lr=1e-3, log_every=7
    )
    second = described(run(tmp_path, "2026-01-02_030406_lr2", 9), 200.0, name="lr2", lr=2e-3)
    described(run(tmp_path, "2026-01-02_030407_lr1", 9), 300.0, tokens="u", name="lr1", lr=1e-3)
    found = find_resume(tmp_path, "auto", SHAPE, mine)
    assert found.run_dir == first
    other_data, other_keys = found.notes
    find_line(other_data, "2026-01-02_030407_lr1", "another experiment", "dataset", "tokens")
    name = "name is lr2 there and lr1 here"
    lr = "lr is 0.002 there and 0.001 here"
    find_line(other_keys, "2026-01-02_030406_lr2", "another experiment", name, lr)
    assert (
        find_resume(
            tmp_path, "auto", SHAPE, {"name": "lr2", "lr": 2e-3, "tokens_sha256": "t"}
        ).run_dir
        == second
    )
    assert find_resume(tmp_path, "auto", SHAPE, mine | {"lr": 3e-3}) is None
    flip(second / "checkpoints" / "step_00000009" / "model-00000.safetensors")
    assert find_resume(tmp_path, "auto", SHAPE, mine).run_dir == first, (
        "damage to another experiment is no loss of this"
    )


def test_find_run_auto_goes_by_utc(tmp_path):
    """A folder's name may come from a clock in another time zone; what its command noted does not."""
    described(run(tmp_path, "2026-01-02_230000_west", 5), 1000.0)
    newer = described(run(tmp_path, "2026-01-02_010000_east", 5), 2000.0)
    assert find_resume(tmp_path, "auto", SHAPE).run_dir == newer


def test_find_run_auto_refuses_to_start_afresh_over_damage(tmp_path):
    broken = run(tmp_path, "2026-03-01_000000_broken", 50)
    (broken / "checkpoints" / "step_00000050" / "manifest.json").unlink()
    text = rf"^no valid checkpoint in {tmp_path}: run .*: checkpoint step_00000050 is damaged .*; remove what"
    with pytest.raises(CheckpointError, match=text):
        find_resume(tmp_path, "auto", SHAPE)


def test_find_run_path(tmp_path, monkeypatch):
    folder = run(tmp_path, "2026-01-02_030405_gpt", 10, 20)
    checkpoints = folder / "checkpoints"
    monkeypatch.chdir(folder)
    for resume, step in {
        folder: 20,
        checkpoints: 20,
        checkpoints / "step_00000010": 10,
        ".": 20,
    }.items():
        found = find_resume(tmp_path / "elsewhere", str(resume), SHAPE)
        assert (found.run_dir, found.state.meta["step"]) == (folder, step)
        assert found.path == checkpoints / f"step_000000{step}"
    copied = shutil.copytree(checkpoints / "step_00000010", tmp_path / "keep" / "best")
    found = find_resume(tmp_path, str(copied), SHAPE)
    assert (found.run_dir, found.path) == (tmp_path / "keep", copied)

    (checkpoints / "step_00000020" / "state.json").unlink()
    note = "checkpoint step_00000020 is damaged (state.json: missing); using step_00000010"
    assert find_resume(tmp_path, str(folder), SHAPE).notes == [note]
    with pytest.raises(
        CheckpointError, match=r"^checkpoint .*step_00000020 is damaged \(state\.json: missing\)"
    ):
        find_resume(tmp_path, str(checkpoints / "step_00000020"), SHAPE)
    (checkpoints / "step_00000010" / "rng.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"; checkpoint step_00000010 is damaged .*; no older one is valid; give --res",
    ):
        find_resume(tmp_path, str(folder), SHAPE)
    for missing in (tmp_path / "nowhere", checkpoints / "step_00000777"):
        with pytest.raises(CheckpointError) as error:
            find_resume(tmp_path, str(missing), SHAPE)
        for part in (
            f"no valid checkpoint in {missing}:",
            "manifest.json, step_*/manifest.json and checkpoints/step_*/manifest.json",
            "give --resume a run folder or one of its step_*",
        ):
            assert part in str(error.value)


def test_shape_that_differs(tmp_path):
    folder = run(tmp_path, "2026-01-02_030405_gpt", 10)
    here = SHAPE | {"n_layer": 6, "vocab_size": 50304}
    with pytest.raises(CheckpointError) as error:
        find_resume(tmp_path, str(folder), here)
    for part in (
        f"checkpoint {folder}/checkpoints/step_00000010 is of another model",
        "n_layer is 2 there and 6 here, vocab_size is 65 there and 50304 here",
        "--resume none",
    ):
        assert part in str(error.value)
    check_shape(make(1), SHAPE)
    with pytest.raises(
        CheckpointError,
        match=r"^the checkpoint is of another model: n_head is unknown there and 2 here",
    ):
        check_shape(StateDict({}, {}, [], {}, {"step": 1}), {"n_head": 2})
