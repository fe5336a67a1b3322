"""CIFAR-10's archive, generated images, and the order, crops and flips of an epoch."""

from __future__ import annotations

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

from nanoray.config import Batch, Config, make_config
from nanoray.data import cifar10
from nanoray.data.cifar10 import RECORD, generate, prepare, read_archive
from nanoray.data.images import MEAN, PAD, STD, ImageData
from nanoray.data.tokens import MicroBatches
from nanoray.errors import DataError
from tests.harness.images import TRAIN, VAL, small_dataset

PER_BATCH = 20


def archive(**changed: bytes | None) -> bytes:
    """Return a small archive in the format of the real one; `changed` replaces or leaves out
    members by their stem.
    """
    members = {f"data_batch_{n}": generate((n - 1) * PER_BATCH, PER_BATCH) for n in range(1, 6)}
    members |= {"test_batch": generate(5 * PER_BATCH, PER_BATCH)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        names = tarfile.TarInfo("cifar-10-batches-bin/batches.meta.txt")
        file.addfile(names, io.BytesIO(b""))
        for stem, data in (members | changed).items():
            if data is not None:
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{stem}.bin")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def config(dataset: str = "cifar10", **values: object) -> Config:
    return make_config({"model": "resnet", "dataset": dataset, "micro_batch_size": 4} | values)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "URL", "file:///no/such/archive")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    return ImageData(small_dataset(tmp_path_factory.mktemp("images")), seed=7)


# ---- the archive ----------------------------------------------------------------------------------------------------


def test_the_archive_gives_the_records_of_its_six_batches_in_order() -> None:
    train, val = read_archive(archive())
    assert train == generate(0, 5 * PER_BATCH)
    assert val == generate(5 * PER_BATCH, PER_BATCH)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (archive(data_batch_3=None), "has no cifar-10-batches-bin/data_batch_3.bin"),
        (
            archive(data_batch_2=b"\x0a" + bytes(RECORD - 1)),
            "data_batch_2.bin: image 0 has class 10, above 9",
        ),
        (archive()[:5000], "not CIFAR-10's binary archive"),
    ],
)
def test_a_strange_archive_is_refused(broken: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_archive(broken)


# ---- generated images -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_network")
def test_without_internet_images_are_generated_and_the_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cifar10, "TRAIN_IMAGES", 60)
    monkeypatch.setattr(cifar10, "VAL_IMAGES", 20)
    info = prepare(config("auto"))
    assert (info.name, info.train_tokens, info.val_tokens) == ("cifar10-generated", 60, 20)
    assert "in place of photographs (CIFAR-10 is not cached and the download failed: " in info.note
    assert "\n" not in info.note
    named = prepare(config("cifar10-generated"))
    assert named.tokens_sha256 == info.tokens_sha256
    assert "failed" not in named.note


def test_generated_images_are_the_same_bytes_on_every_machine() -> None:
    assert (
        hashlib.sha256(generate(0, 300)).hexdigest()
        == "6239d14f5030047fb4e0172e12deb8568c51a547359e84f9adf8bdac716ad681"
    )
    assert generate(0, 300)[100 * RECORD :] == generate(100, 200)


# ---- the order ------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_and_the_next_one_is_another(data: ImageData) -> None:
    orders = [data.epochs.order(epoch).copy() for epoch in range(4)]
    assert all(sorted(order) == list(range(TRAIN)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 4
    assert data.epochs.order(1).tobytes() == orders[1].tobytes(), "going back, too"
    assert np.corrcoef(orders[0], np.arange(TRAIN))[0, 1] == pytest.approx(0.0, abs=0.3)


def test_a_batch_may_hold_the_end_of_an_epoch_and_the_start_of_the_next(data: ImageData) -> None:
    ends = data.epochs.indices(TRAIN - 3, 5)
    assert ends.tolist() == [*data.epochs.order(0)[-3:], *data.epochs.order(1)[:2]]
    far = data.epochs.indices(0, 3 * TRAIN)
    assert np.bincount(far).tolist() == [3] * TRAIN


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_any_number_of_ranks_cuts_the_same_samples(data: ImageData, dp: int) -> None:
    """Pixels and classes of each step, put together from all ranks, equal those of one process."""
    for first in (0, 84):  # 84 + 24 goes over the end of the epoch
        parts = [
            MicroBatches(data, Batch(12 // dp, 2, dp), rank).get(first, micro)
            for micro in range(2)
            for rank in range(dp)
        ]
        x, y = data.train_batch(first, 24)
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)


# ---- crop, flip, validation -----------------------------------------------------------------------------------------


def test_each_sample_is_a_crop_of_its_padded_image_perhaps_mirrored(data: ImageData) -> None:
    """Found by trying all 162 ways; every place and both sides occur, and a repeated draw is the
    same.
    """
    x, y = data.train_batch(0, TRAIN)
    raw = np.frombuffer(generate(0, TRAIN), np.uint8).reshape(TRAIN, RECORD)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    ways = []
    for image, label, index in zip(x, y, data.epochs.order(0), strict=True):
        assert label == raw[index, 0]
        padded = np.pad(raw[index, 1:].reshape(3, 32, 32), ((0, 0), (PAD, PAD), (PAD, PAD)))
        padded = (torch.from_numpy(padded).float() - mean) / std
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if torch.equal(image, cut(padded, top, left, flip))
        ]
        assert len(found) == 1
        ways += found
    assert {top for top, _, _ in ways} == {left for _, left, _ in ways} == set(range(9))
    assert 30 < sum(flip for _, _, flip in ways) < 70
    assert torch.equal(data.train_batch(40, 2)[0], x[40:42])
    assert not torch.equal(data.train_batch(TRAIN, TRAIN)[0], x)


def cut(padded: torch.Tensor, top: int, left: int, flip: bool) -> torch.Tensor:
    image = padded[:, top : top + 32, left : left + 32]
    return image.flip(2) if flip else image


def test_validation_images_are_whole_evenly_spaced_and_not_repeated(data: ImageData) -> None:
    assert data.val_windows(1000).tolist() == list(range(VAL))
    some = data.val_windows(7).tolist()
    assert (some[0], some[-1], len({*some})) == (0, VAL - 1, 7)
    x, y = data.val_batch(np.array([5]))
    raw = np.frombuffer(generate(TRAIN + 5, 1), np.uint8)
    assert y.item() == raw[0]
    assert x[0, 0, 0, 0].item() == pytest.approx((raw[1] - MEAN[0]) / STD[0], abs=1e-5)
