"""CIFAR-10's archive, generated images, and the order, crops and flips of an epoch."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoray.config import Batch, Config, make_config
from nanoray.data import cifar10
from nanoray.data.cifar10 import CLASSES, RECORD, generate, prepare, read_archive
from nanoray.data.images import MEAN, PAD, STD, ImageData
from nanoray.data.prepare import prepare as prepare_any
from nanoray.data.tokens import MicroBatches
from nanoray.errors import DataError
from tests.harness.images import TRAIN, VAL, small_dataset

PER_BATCH = 20


def archive() -> bytes:
    """Return a small archive in the format of the real one."""
    members = {f"data_batch_{n}": generate((n - 1) * PER_BATCH, PER_BATCH) for n in range(1, 6)}
    members |= {"test_batch": generate(5 * PER_BATCH, PER_BATCH)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        for stem, data in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{stem}.bin")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def config(dataset: str = "cifar10", **values: object) -> Config:
    return make_config({"model": "resnet", "dataset": dataset, "micro_batch_size": 4} | values)


def refused(dataset: str = "cifar10", **values: object) -> str:
    with pytest.raises(DataError) as caught:
        prepare(config(dataset, **values))
    return str(caught.value)


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


@pytest.mark.usefixtures("no_network")
def test_a_copy_of_the_archive_in_the_cache_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, small = tmp_path / "cifar-10-binary.tar.gz", archive()
    path.write_bytes(small)
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(small).hexdigest())
    first = prepare_any(config(data_dir=str(tmp_path)))
    assert (first.name, first.kind, first.train_tokens, first.val_tokens) == (
        "cifar10",
        "images",
        100,
        20,
    )
    assert first.vocab_size == len(CLASSES)
    path.unlink()
    again = prepare_any(config("auto", data_dir=str(tmp_path)))
    assert again.note.endswith(", cached")
    assert again.tokens_sha256 == first.tokens_sha256
    x, y = ImageData(again, seed=0).val_batch(np.arange(20))
    raw = np.frombuffer(generate(5 * PER_BATCH, PER_BATCH), np.uint8).reshape(20, RECORD)
    assert y.tolist() == raw[:, 0].tolist()
    pixels = x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert torch.allclose(
        pixels.flatten(1), torch.from_numpy(raw[:, 1:].astype(np.float32)), atol=1e-3
    )


@pytest.mark.parametrize("dataset", ["auto", "cifar10"])
def test_a_damaged_copy_of_the_archive_is_named_and_nothing_else_is_taken(
    tmp_path: Path, dataset: str
) -> None:
    copy = tmp_path / "cifar-10-binary.tar.gz"
    copy.write_bytes(archive()[:1000])
    with pytest.raises(DataError, match="is not CIFAR-10's archive"):
        prepare(config(dataset, data_dir=str(tmp_path)))


@pytest.mark.usefixtures("no_network")
def test_cifar10_by_name_is_never_replaced() -> None:
    assert refused().startswith("cannot get CIFAR-10 from file:///no/such/archive: ")


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


def test_a_file_that_shrank_is_found(tmp_path: Path) -> None:
    info = small_dataset(tmp_path)
    opened = ImageData(info, seed=0)
    with (info.path / "train.bin").open("r+b") as file:
        file.truncate(RECORD)
    with pytest.raises(DataError, match="dataset changed"):
        opened.train_batch(0, 4)
