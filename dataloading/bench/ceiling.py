"""The upper limit of loading on this machine: the fastest installed decoder alone, on all usable cores at once.

It decodes from memory into a buffer that is reused: no files, no batches, no consumer. The workers of a ``DataLoader`` do it, and send
back nothing but the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from common.data.datasets import BatchKey
from dataloading.dataset.decoders import decode_pillow, get_decoder


class Ceiling(Dataset[Any]):
    """JPEG files in memory, which are decoded and forgotten; for ``collate_fn=keep_batch``.

    :param images: contents of the files
    :param decoder: one of :data:`common.data.DECODERS`
    """

    def __init__(self, images: Sequence[bytes], decoder: str) -> None:
        self._images, self._decode = images, get_decoder(decoder)
        self._out = np.empty_like(decode_pillow(images[0]))

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, key: BatchKey) -> tuple[npt.NDArray[np.int64]]:
        for sample in key.samples.tolist():
            self._decode(self._images[sample], self._out)
        return (key.samples,)
