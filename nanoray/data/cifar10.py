"""Prepare CIFAR-10 (Krizhevsky 2009): its binary archive, or generated images of the same sizes,
become train.bin and val.bin. data/images.py reads batches from them.

Both files are a sequence of records, as in the archive: the class, one byte, then 32 x 32 bytes of
red, green and blue. Nothing is unpickled, and nothing of the archive is written to disk but the
bytes of its six known members.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanoray.config import Config
from nanoray.data import download
from nanoray.data.dataset import DatasetInfo, cache_dir, write
from nanoray.data.download import FetchFailed, fetch
from nanoray.data.verify import verify
from nanoray.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# Of its 170,052,171 bytes
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue, each row by row
RECORD = 1 + PIXELS
TRAIN_IMAGES, VAL_IMAGES = 50_000, 10_000  # of the real dataset, and of the generated one

_ARCHIVE = "cifar-10-binary.tar.gz"
_TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6))
_VAL = ("cifar-10-batches-bin/test_batch.bin",)
_MOST_BYTES, _TOTAL_S = 256 << 20, 600.0  # for one try to download
_CHUNK = 2_000  # generated images at a time


def prepare(config: Config) -> DatasetInfo:
    """Find or make the files of `config.dataset`: auto, cifar10 or cifar10-generated. (driver or
    rank 0 only)

    auto takes CIFAR-10 from the cache or the network, and generates images when neither has it.
    Raises DataError when CIFAR-10 was asked for and cannot be had.
    """
    if config.dataset == "cifar10-generated":
        return _generated(config, "")
    try:
        tries = 1 if config.dataset == "auto" and not config.data_url else download.TRIES
        return _real(config, tries)
    except FetchFailed as error:
        if config.dataset == "auto" and not config.data_url:
            return _generated(config, f" (CIFAR-10 is not cached and the download failed: {error})")
        raise DataError(
            f"cannot get CIFAR-10 from {config.data_url or URL}: {error} (sha256 expected "
            f"{SHA256}, got {error.got}); "
            f"give a copy with --data_url file:///path/{_ARCHIVE}, or use --dataset "
            "cifar10-generated"
        ) from None


def folder_of(config: Config) -> Path:
    """Return the folder of the cache that the real images are in, once they are there with their
    meta.json.
    """
    return cache_dir(config) / "images" / f"cifar10-{SHA256[:16]}"


def _real(config: Config, tries: int) -> DatasetInfo:
    """Reuse the cached files, or make them of the archive. Raises FetchFailed, and DataError for a
    strange archive.
    """
    note = "cifar10: 60,000 photographs of 10 classes (Krizhevsky 2009)"
    folder = folder_of(config)
    if found := _reuse(folder, "cifar10"):
        return replace(found, note=f"{note}, cached")
    url = config.data_url or URL
    data = fetch(url, tries, _TOTAL_S, _MOST_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise FetchFailed(f"these {len(data)} bytes are another file", got=digest)
    train, val = read_archive(data)
    info = DatasetInfo(
        "cifar10", f"{note}, from {url}", folder, *_sizes(train, val), digest, "", {}
    )
    return store(folder, info, train, val)


def read_archive(data: bytes) -> tuple[bytes, bytes]:
    """Return the records of the training batches and of the test batch of CIFAR-10's binary
    archive.

    Raises DataError when a batch is missing, is not made of whole records, or has a class beyond 9.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            members = {member.name: member for member in archive.getmembers() if member.isreg()}
            splits = [
                b"".join(_member(archive, members, name) for name in names)
                for names in (_TRAIN, _VAL)
            ]
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"not CIFAR-10's binary archive: {error}; download {URL} again") from None
    return splits[0], splits[1]


def _member(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    found = members.get(name)
    stream = archive.extractfile(found) if found and found.size <= _MOST_BYTES else None
    if stream is None:
        raise DataError(f"CIFAR-10's archive has no {name}; download {URL} again")
    data = stream.read()
    if not data or len(data) % RECORD:
        raise DataError(
            f"{name} has {len(data)} bytes, not a multiple of {RECORD}; download {URL} again"
        )
    labels = np.frombuffer(data, np.uint8)[::RECORD]
    if labels.max() >= len(CLASSES):
        raise DataError(
            f"{name}: image {int(labels.argmax())} has class {labels.max()}, above 9; download "
            f"{URL} again"
        )
    return data


def _generated(config: Config, why: str) -> DatasetInfo:
    """Reuse or make images that a network can learn to tell apart, in the sizes of CIFAR-10."""
    note = f"cifar10-generated: patterns of 10 classes under noise, in place of photographs{why}"
    folder = cache_dir(config) / "images" / "cifar10-generated-v1"
    if found := _reuse(folder, "cifar10-generated"):
        return replace(found, note=note)
    train, val = generate(0, TRAIN_IMAGES), generate(TRAIN_IMAGES, VAL_IMAGES)
    info = DatasetInfo("cifar10-generated", note, folder, *_sizes(train, val), "", "", {})
    return store(folder, info, train, val)


def generate(first: int, count: int) -> bytes:
    """Return `count` records from number `first` on: a mosaic of 4 x 4 coloured tiles per class,
    under strong noise.

    Pure integer arithmetic on hashes of the record's number: the same bytes on every machine, with
    any numpy.
    """
    tiles = _bytes(np.arange(len(CLASSES) * 6, dtype=np.uint64) << np.uint64(32)).reshape(
        len(CLASSES), 3, 4, 4
    )
    mosaics = (
        tiles.repeat(8, axis=2).repeat(8, axis=3).reshape(len(CLASSES), PIXELS).astype(np.uint16)
    )
    words = PIXELS // 8  # hashes that an image needs
    records = np.empty((count, RECORD), np.uint8)
    for at in range(0, count, _CHUNK):
        numbers = np.arange(first + at, first + min(at + _CHUNK, count), dtype=np.uint64)
        labels = (numbers % np.uint64(len(CLASSES))).astype(np.uint8)
        noise = _bytes(
            ((numbers + np.uint64(1)) << np.uint64(16))[:, None] + np.arange(words, dtype=np.uint64)
        )
        # One part pattern, three of noise
        mixed = mosaics[labels] + np.uint16(3) * noise.reshape(len(numbers), PIXELS)
        records[at : at + len(numbers), 0] = labels
        records[at : at + len(numbers), 1:] = mixed // 4
    return records.tobytes()


def _bytes(z: np.ndarray) -> np.ndarray:
    """Return eight hashed bytes for each uint64 (SplitMix64's finalizer), the lowest first, as one
    flat array.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype("<u8").reshape(-1).view(np.uint8)


def _sizes(train: bytes, val: bytes) -> tuple[str, int, int, int]:
    """Return dtype, classes, and the images of both splits, as DatasetInfo wants them."""
    return "uint8", len(CLASSES), len(train) // RECORD, len(val) // RECORD


def store(folder: Path, info: DatasetInfo, train: bytes, val: bytes) -> DatasetInfo:
    """Write the files of the cache; meta.json comes last, so a folder that has it is complete."""
    digest = hashlib.sha256(train)
    digest.update(val)
    info = replace(info, tokens_sha256=digest.hexdigest(), kind="images")
    write(folder / "train.bin", train)
    write(folder / "val.bin", val)
    write(folder / "meta.json", json.dumps(info.to_dict(), indent=2).encode())
    verify(folder, info.tokens_sha256)
    return info


def _reuse(folder: Path, name: str) -> DatasetInfo | None:
    """Return the record of a complete and unchanged folder of the cache, else None: it is made
    again.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, DataError):
        info = replace(
            DatasetInfo.from_dict(json.loads((folder / "meta.json").read_bytes())),
            path=folder,
            name=name,
        )
        verify(folder, info.tokens_sha256)
        return info
    return None
