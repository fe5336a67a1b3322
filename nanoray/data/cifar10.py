"""Prepare CIFAR-10 (Krizhevsky 2009), or generated images of the same sizes.

They become train.bin and val.bin, from which data/images.py reads batches. Both files are a
sequence of records, as in the archive: the class, one byte, then 32 x 32 bytes of red, green and
blue. Nothing is unpickled, and of the archive only the bytes of its six known members are written
to disk.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanoray.config import Config
from nanoray.data.cache import cache_dir, reuse, store
from nanoray.data.dataset import DatasetInfo
from nanoray.data.download import FetchFailed, fetch
from nanoray.data.order import mix
from nanoray.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# Of its 170,052,171 bytes
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32  # bytes of an image: red, green, blue, each row by row
RECORD = 1 + PIXELS
TRAIN_IMAGES = 50_000  # of the real dataset, and of the generated one
VAL_IMAGES = 10_000

_ARCHIVE = "cifar-10-binary.tar.gz"
_TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6))
_VAL = ("cifar-10-batches-bin/test_batch.bin",)
_MOST_BYTES = 256 << 20  # of a download
_CHUNK = 2_000  # generated images at a time


def prepare(config: Config) -> DatasetInfo:
    """Find or make the files of `config.dataset`. (driver or rank 0 only)

    cifar10 comes from the cache or the network; auto generates images when neither has it. Raises
    DataError when cifar10 cannot be downloaded.
    """
    if config.dataset == "cifar10-generated":
        return _generated(config, "")
    try:
        return _real(config)
    except FetchFailed as error:
        if config.dataset == "auto":
            return _generated(config, f" (CIFAR-10 is not cached and the download failed: {error})")
        raise DataError(
            f"cannot get CIFAR-10 from {URL}: {error} (sha256 expected {SHA256}, got {error.got}); "
            f"copy it to {cache_dir(config) / _ARCHIVE}, or use --dataset cifar10-generated"
        ) from None


def _real(config: Config) -> DatasetInfo:
    """Reuse the cached files, or make them from the archive. Raises FetchFailed."""
    note = "cifar10: 60,000 photographs of 10 classes (Krizhevsky 2009)"
    folder = cache_dir(config) / "images" / f"cifar10-{SHA256[:16]}"
    cached = reuse(folder)
    if cached is not None:
        return replace(cached, note=f"{note}, cached")
    # Where there is no network, a copy of the archive lies in the cache.
    copy = cache_dir(config) / _ARCHIVE
    url = str(copy) if copy.exists() else URL
    data = fetch(url, most_bytes=_MOST_BYTES)
    # Without the check, a proxy's error page would be unpacked.
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        if url != URL:
            raise DataError(
                f"{copy} is not CIFAR-10's archive (sha256 {digest}); copy it again, or remove it"
            )
        raise FetchFailed(f"these {len(data)} bytes are another file", got=digest)
    train, val = read_archive(data)
    return store_images("cifar10", f"{note}, from {url}", folder, train, val, digest)


def read_archive(data: bytes) -> tuple[bytes, bytes]:
    """Return the records of the training batches and of the test batch of the binary archive.

    Its hash has been compared.
    """
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        train, val = (
            b"".join(_member(archive, name) for name in names) for names in (_TRAIN, _VAL)
        )
    return train, val


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    assert stream is not None, "a regular file"
    return stream.read()


def _generated(config: Config, why: str) -> DatasetInfo:
    """Reuse or make images that a network can learn to classify, in the sizes of CIFAR-10."""
    note = f"cifar10-generated: patterns of 10 classes under noise, in place of photographs{why}"
    folder = cache_dir(config) / "images" / "cifar10-generated-v1"
    cached = reuse(folder)
    if cached is not None:
        return replace(cached, note=note)
    train = generate(0, TRAIN_IMAGES)
    val = generate(TRAIN_IMAGES, VAL_IMAGES)
    return store_images("cifar10-generated", note, folder, train, val)


def generate(first: int, count: int) -> bytes:
    """Return `count` records from number `first` on.

    Each class has a mosaic of 4 x 4 coloured tiles, under strong noise. Pure integer arithmetic on
    hashes of the record's number: the same bytes on every machine, with any numpy.
    """
    classes = len(CLASSES)
    words = PIXELS // 8  # hashes that an image needs

    # One mosaic per class: 4 x 4 tiles of 8 x 8 pixels, in three colours.
    seeds = np.arange(classes * 6, dtype=np.uint64) << np.uint64(32)
    tiles = _hash_to_bytes(seeds).reshape(classes, 3, 4, 4)
    mosaics = tiles.repeat(8, axis=2).repeat(8, axis=3).reshape(classes, PIXELS).astype(np.uint16)

    # In chunks, because the noise in 16 bits takes twice the memory of the records.
    records = np.empty((count, RECORD), np.uint8)
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        numbers = np.arange(first + start, first + end, dtype=np.uint64)  # (N,)
        labels = (numbers % np.uint64(classes)).astype(np.uint8)  # (N,)
        seeds = (numbers + np.uint64(1)) << np.uint64(16)
        seeds = np.add(seeds[:, None], np.arange(words, dtype=np.uint64))  # (N, words)
        noise = _hash_to_bytes(seeds).reshape(len(numbers), PIXELS)

        # One part pattern, three parts noise.
        mixed = mosaics[labels] + np.uint16(3) * noise  # (N, PIXELS)
        records[start:end, 0] = labels
        records[start:end, 1:] = mixed // 4
    return records.tobytes()


def _hash_to_bytes(z: np.ndarray) -> np.ndarray:
    """Return eight hashed bytes for each uint64, the lowest first, as one flat array."""
    return mix(z).astype("<u8").reshape(-1).view(np.uint8)


def store_images(
    name: str, note: str, folder: Path, train: bytes, val: bytes, source_sha256: str = ""
) -> DatasetInfo:
    """Write the files of the cache, and return their record."""
    # One hash over both files, in the order in which `verify` reads them.
    digest = hashlib.sha256(train)
    digest.update(val)
    info = DatasetInfo(
        name=name,
        note=note,
        path=folder,
        dtype="uint8",
        vocab_size=len(CLASSES),
        train_tokens=len(train) // RECORD,
        val_tokens=len(val) // RECORD,
        sha256=source_sha256,
        tokens_sha256=digest.hexdigest(),
        tokenizer={},
        kind="images",
    )
    store(info, train, val)
    return info
