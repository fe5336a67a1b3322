"""Read batches of images in an order that depends only on the seed.

Sample i is a pure function of (seed, i), as with texts: image number i mod N of epoch i // N,
cropped and flipped by a hash of (seed, i). An epoch is a permutation of the N images, a pure
function of (seed, epoch). So the number of ranks does not matter, and one integer resumes the order
in the middle of an epoch.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoray.data.cifar10 import RECORD
from nanoray.data.dataset import DatasetInfo
from nanoray.data.order import GOLDEN, EpochOrder, mix
from nanoray.data.tokens import MemoryMap, evenly_spaced, on_device, open_mapped

SIZE = 32  # rows and columns of an image
PAD = 4  # black pixels around it, from which a crop may take some
# Of CIFAR-10's training pixels: red, green, blue
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)
# Two streams of hashes of one seed
_EPOCHS = np.uint64(0x5851F42D4C957F2D)
_CROPS = np.uint64(0x14057B7EF767814F)


class ImageData:
    """The two splits, memory-mapped: all ranks of a node share the page cache."""

    def __init__(self, info: DatasetInfo, seed: int, device: torch.device | None = None) -> None:
        """Open `info`. Raises DataError when its files' sizes are not the recorded ones."""
        self.count = {"train": info.train_tokens, "val": info.val_tokens}
        self._files = {split: open_mapped(info, split, RECORD) for split in self.count}
        self.device = device

        # Arrays of one element: numpy warns of overflow in scalars, not in arrays.
        seeds = np.array([seed], np.uint64)  # (1,)
        self.epochs = EpochOrder(self.count["train"], mix(seeds ^ _EPOCHS))
        self._crops = mix(seeds ^ _CROPS)  # (1,)
        self._mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(STD, device=device).view(1, 3, 1, 1)

    def train_batch(self, first_sample: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (B, 3, 32, 32) float32 and classes (B,) int64, on the device.

        Each image is padded by 4 black pixels, cropped to its size at one of 9 x 9 places, and
        mirrored or not.
        """
        # Different bits of a sample's hash choose its crop and its direction.
        samples = np.arange(first_sample, first_sample + count, dtype=np.uint64)
        hashes = mix(self._crops + (samples + np.uint64(1)) * GOLDEN)  # (B,)
        places = np.uint64(2 * PAD + 1)
        top = (hashes % places).astype(np.int64)  # (B,)
        left = ((hashes >> np.uint64(16)) % places).astype(np.int64)  # (B,)
        flipped = (hashes >> np.uint64(32)) & np.uint64(1) == 1  # (B,)

        images, labels = self._read("train", self.epochs.indices(first_sample, count))
        images = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))  # (B, 3, 40, 40)

        # Crop and mirror all images at once, by the rows and columns that each one keeps.
        pixel = np.arange(SIZE)
        rows = top[:, None] + pixel  # (B, 32)
        columns = left[:, None] + np.where(flipped[:, None], pixel[::-1], pixel)  # (B, 32)
        sample = np.arange(count)[:, None, None, None]
        channel = np.arange(3)[:, None, None]
        cropped = images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
        return self._on_device(cropped, labels)

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` images of val.bin, evenly spaced, int64."""
        return evenly_spaced(self.count["val"] - 1, min(limit, self.count["val"]))

    def val_batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (B, 3, 32, 32) float32 and classes (B,) int64 of val.bin, on the device."""
        return self._on_device(*self._read("val", starts))

    def _read(self, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images (B, 3, 32, 32) and classes (B,), as bytes."""
        file: MemoryMap = self._files[split]
        file.require_whole()
        records = file.numbers.reshape(-1, RECORD)[indices]  # (B, RECORD)
        return records[:, 1:].reshape(-1, 3, SIZE, SIZE), records[:, 0]

    def _on_device(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move bytes to the device, and normalise them there."""
        x = on_device(np.ascontiguousarray(images), self.device)
        y = on_device(labels.astype(np.int64), self.device)
        return (x.float() - self._mean) / self._std, y
