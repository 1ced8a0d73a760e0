"""The embedded text: sums, one a line. A model reads it character by character, and predicts the next.

    47+385=432.
    8+6=14.

A sample is a line. Its inputs are all characters but the last, its targets all but the first; lines of different length are
filled up with zeros, whose target counts for nothing. Every draw is a function of (split, sample), so line ``i`` is the same
on every machine, however many are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.data.datasets import ImageData, ImageDataset, fingerprint_of, first_samples
from common.randomness import integers

CHARACTERS = ".0123456789+="
SAMPLES = {"train": 12_000, "test": 2_000}
DIGITS = 3  # of a summand, at most
LENGTH = len("999+999=1998")  # inputs or targets of the longest line
NO_TARGET = -100  # what cross_entropy ignores


@dataclass(frozen=True)
class TextData(ImageData):
    """Lines of text in the place of images: a line is an image of one row, uint8 ``[1, 1, length]``. Its labels are int64
    ``[length]``, the next characters and :data:`NO_TARGET`."""

    def to_input(self, images: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """The model's input: int64 ``[n, length]``."""
        return images.flatten(1).long()

    def text_of(self, characters: Tensor) -> str:
        """A line, from the numbers of its characters: ``[length]``. Those below 0 are left out."""
        return "".join(self.classes[number] for number in characters.tolist() if number >= 0)


def load(train_samples: int | None = None, test_samples: int | None = None) -> TextData:
    """Draw the sums.

    :param train_samples: use only the first so many; all when None
    :param test_samples: likewise
    :raises UsageError: when there are fewer
    """
    train, test = (
        write(split, first_samples(split, limit, SAMPLES[split], "sums"))
        for split, limit in (("train", train_samples), ("test", test_samples))
    )
    return TextData(
        name="sums",
        train=ImageDataset(*train),
        test=ImageDataset(*test),
        classes=tuple(CHARACTERS),
        mean=0.0,
        std=1.0,
        fingerprint=fingerprint_of((train, test)),
        unit="characters",
    )


def write(split: str, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The first ``count`` lines of a split.

    :param split: ``"train"`` or ``"test"``: two independent streams, which may have a sum in common
    :returns: inputs uint8 ``[count, 1, 1, LENGTH]`` and targets int64 ``[count, LENGTH]``
    """
    samples = np.arange(count)
    lengths = integers(2, 1, DIGITS, f"sums-{split}", samples, "digits")
    draws = integers(2, 0, 10**DIGITS - 1, f"sums-{split}", samples, "summands") % 10**lengths
    inputs = np.zeros((count, LENGTH), np.uint8)
    targets = np.full((count, LENGTH), NO_TARGET, np.int64)
    for sample, (first, second) in enumerate(draws.tolist()):
        numbers = [CHARACTERS.index(character) for character in f"{first}+{second}={first + second}."]
        inputs[sample, : len(numbers) - 1] = numbers[:-1]
        targets[sample, : len(numbers) - 1] = numbers[1:]
    return inputs[:, None, None], targets
