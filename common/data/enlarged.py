"""Images in memory that are enlarged as they are fetched: a workload of ImageNet's size, drawn from a few megabytes."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import Dataset

from common.data.datasets import Batch, BatchKey, ImageData, Images

CHANNELS = 3


def enlarge(data: ImageData, side: int) -> ImageData:
    """The data set with images of this height and width; see :class:`EnlargedImages`."""
    return replace(data, train=EnlargedImages(data.train, side), test=EnlargedImages(data.test, side))


class EnlargedImages(Dataset[Batch]):
    """Each pixel as a square of pixels, in three equal channels.

    :param images: square ones of one channel
    :param side: height and width of the enlarged ones, a multiple of theirs
    """

    def __init__(self, images: Images, side: int) -> None:
        self.small, self.labels, self.shape = images, images.labels, (CHANNELS, side, side)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, key: BatchKey) -> Batch:
        images, labels = self.small.__getitems__(key)
        factor = self.shape[-1] // images.shape[-1]
        wide = images.repeat_interleave(factor, dim=3)  # first: whole rows and channels are faster to copy than pixels
        return Batch(wide.repeat_interleave(factor, dim=2).repeat(1, CHANNELS, 1, 1), labels)
