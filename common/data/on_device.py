"""How batches come to a GPU without a wait: a data set in memory is kept there, and every other batch is copied beside the step.

A GPU idles while the host makes a batch, and while the batch is copied on the stream that also computes. A data set in memory
is small beside a GPU's memory. So it is copied once, and a batch of it is a few kernels (:func:`kept_on_device`). Batches that
are made on the host are copied on a stream of their own, while the device computes on the batch before (:func:`copied_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.data.datasets import Batch, BatchKey, ImageDataset, Images
from common.data.enlarged import EnlargedImages

MOST_OF_FREE_MEMORY = 0.1  # of the device, that a data set may take: the rest is for training


def kept_on_device(images: Images, device: torch.device) -> Images:
    """The images on this device if it is a GPU, they are in memory, and there is room for them; otherwise as they are.

    Enlarged ones are enlarged there.
    """
    if isinstance(images, EnlargedImages):
        kept = kept_on_device(images.small, device)
        return images if kept is images.small else EnlargedImages(kept, images.shape[-1])
    if device.type != "cuda" or not isinstance(images, ImageDataset):
        return images
    free, _ = torch.cuda.mem_get_info(device)
    if images.images.nbytes + images.labels.nbytes > MOST_OF_FREE_MEMORY * free:
        return images
    return ImagesOnDevice(images, device)


class ImagesOnDevice:
    """An :class:`ImageDataset` whose images lie on a device; its batches are the same, bit for bit, and lie there too.

    The border that augmentation shifts over is stored once, around every image. So a batch is one gather: of each sample, the
    rows and columns that its draws say. These are made on the host and sent along with the indices, 32 bytes per sample.
    """

    def __init__(self, images: ImageDataset, device: torch.device) -> None:
        self.labels, self.shape, self._device = images.labels, images.shape, device
        self._augmentation, self._seed = images.augmentation, images.seed
        channels, height, width = images.shape
        border = images.augmentation.shift
        self._bordered = torch.full(
            (len(images), channels, height + 2 * border, width + 2 * border),
            images.augmentation.fill,
            dtype=torch.uint8,
            device=device,
        )
        inside = self._bordered[:, :, border : border + height, border : border + width]
        inside.copy_(torch.tensor(images.images))
        self._labels = torch.tensor(images.labels, device=device)
        self._channels, self._rows, self._columns = (torch.arange(n, device=device) for n in images.shape)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, key: BatchKey) -> Batch:
        samples, top, left, step = send(torch.from_numpy(self._gathered(key)), self._device)
        rows = top[:, None] + self._rows  # [n, height]
        columns = left[:, None] + step[:, None] * self._columns  # [n, width]
        images = self._bordered[
            samples[:, None, None, None],
            self._channels[:, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]
        return Batch(images, self._labels[samples])

    def _gathered(self, key: BatchKey) -> npt.NDArray[np.int64]:
        """The indices to gather: of each sample its index, first row, first column, and the step (-1 if mirrored) to the next column.

        :returns: int64 ``[4, n]``
        """
        down, right, mirrored = self._augmentation.draw(self._seed, key.epoch, key.samples)
        last = right + self.shape[2] - 1
        return np.stack([key.samples, down, np.where(mirrored, last, right), np.where(mirrored, -1, 1)])


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches on a GPU. Each is copied on a stream of its own, while the device still computes on the one before.

    The host's buffer of a batch may be reused as soon as the next one is asked for: its copy is over then.

    :param batches: on the CPU; a copy from pinned memory takes no time of the host
    :param device: a GPU; a batch is ready for what the caller queues on its current stream
    """
    copying = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = Batch(*(send(tensor, device) for tensor in batch))
            copied = copying.record_event()
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)  # the device waits, not the host
        for tensor in moved:  # or the next copy might get its memory, while a kernel still reads it
            tensor.record_stream(computing)
        try:
            yield moved
        finally:
            copied.synchronize()  # the host waits, as a rule for nothing: a step has passed
        del batch, moved


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. On a GPU it is queued, and read from pinned memory: from other memory the host would wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
