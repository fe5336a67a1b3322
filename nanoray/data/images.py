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
from nanoray.data.order import EpochOrder
from nanoray.data.tokens import GOLDEN, MappedFile, evenly_spaced, mix, open_mapped

# Rows and columns of an image; black pixels around it, of which the crop takes some
SIZE, PAD = 32, 4
# Of CIFAR-10's training pixels: red, green, blue
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
# Two streams of hashes of one seed
_EPOCHS, _CROPS = np.uint64(0x5851F42D4C957F2D), np.uint64(0x14057B7EF767814F)


class ImageData:
    """The two splits, memory-mapped: all ranks of a node share the page cache."""

    def __init__(self, info: DatasetInfo, seed: int, device: torch.device | None = None) -> None:
        """Open `info`. Raises DataError when the sizes of its files are not those that `prepare`
        recorded.
        """
        self.count = {"train": info.train_tokens, "val": info.val_tokens}
        self._files = {
            split: open_mapped(info, split, images * RECORD) for split, images in self.count.items()
        }
        self.device = device
        # (1,) each
        epochs, self._crops = np.split(
            mix(np.array([seed], np.uint64) ^ np.array([_EPOCHS, _CROPS])), 2
        )
        self.epochs = EpochOrder(self.count["train"], epochs)
        self._mean, self._std = (
            torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD)
        )

    def train_batch(self, first_sample: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (B, 3, 32, 32) float32, cropped and flipped, and classes (B,) int64, on the
        device.

        Each image is padded by 4 black pixels, cut to its size again at one of 9 x 9 places, and
        mirrored or not.
        """
        index = np.arange(first_sample, first_sample + count, dtype=np.uint64)
        hashes = mix(self._crops + (index + np.uint64(1)) * GOLDEN)  # (B,)
        places = 2 * PAD + 1
        # (B,) each
        top, left = hashes % np.uint64(places), (hashes >> np.uint64(16)) % np.uint64(places)
        flipped = (hashes >> np.uint64(32)) & np.uint64(1) == 1  # (B,)
        images, labels = self._read("train", self.epochs.indices(first_sample, count))
        images = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))  # (B, 3, 40, 40)
        pixel = np.arange(SIZE)
        rows = top.astype(np.int64)[:, None] + pixel  # (B, 32)
        # (B, 32)
        columns = left.astype(np.int64)[:, None] + np.where(flipped[:, None], pixel[::-1], pixel)
        sample, channel = np.arange(count)[:, None, None, None], np.arange(3)[:, None, None]
        return self._on_device(
            images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]], labels
        )

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` images of val.bin, evenly spaced from end to end,
        int64.
        """
        return evenly_spaced(self.count["val"] - 1, min(limit, self.count["val"]))

    def val_batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole images (B, 3, 32, 32) float32 and classes (B,) int64 of these numbers, on
        the device.
        """
        return self._on_device(*self._read("val", starts))

    def _read(self, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images (B, 3, 32, 32) and classes (B,), as bytes."""
        file: MappedFile = self._files[split]
        file.require_whole()
        records = file.numbers.reshape(-1, RECORD)[indices]  # (B, RECORD)
        return records[:, 1:].reshape(-1, 3, SIZE, SIZE), records[:, 0]

    def _on_device(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move bytes to the device, and normalise them there."""
        x, y = (
            torch.from_numpy(np.ascontiguousarray(images)),
            torch.from_numpy(labels.astype(np.int64)),
        )
        if self.device is not None and self.device.type == "cuda":
            x, y = (
                x.pin_memory().to(self.device, non_blocking=True),
                y.pin_memory().to(self.device, non_blocking=True),
            )
        elif self.device is not None:
            x, y = x.to(self.device), y.to(self.device)
        return (x.float() - self._mean) / self._std, y
