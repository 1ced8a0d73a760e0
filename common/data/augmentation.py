"""Augmentation of a whole batch at once, as a pure function of (seed, epoch, sample).

The images stay uint8: a shift and a flip need no arithmetic, and a batch of uint8 is a quarter of the size when it is copied
to the device. Nothing here has state. So a sample looks the same in one epoch whichever worker or rank fetches it, at every
world size, and different in the next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from common.randomness import uniform


@dataclass(frozen=True)
class Augmentation:
    """Random shift and mirroring of training images.

    :param shift: maximum pixels by which an image moves in each direction
    :param flip: whether it may be mirrored left to right
    :param fill: the value of uncovered pixels
    """

    shift: int = 0
    flip: bool = False
    fill: int = 0

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return bool(self.shift or self.flip)

    def draw(
        self, seed: int, epoch: int, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The draws of each sample in this epoch: where the frame lies on the image with its border, and whether it is mirrored.

        :param samples: int64 ``[n]``
        :returns: rows from the top and columns from the left, int64 ``[n]`` of 0 to ``2 * shift``, and bool ``[n]``
        """
        draws = uniform(3, seed, "augmentation", epoch, samples)  # [n, 3]: down, right, mirrored?
        down, right = (draws[:, :2] * (2 * self.shift + 1)).astype(np.int64).T
        return down, right, (draws[:, 2] < 0.5) & self.flip

    def __call__(
        self, images: npt.NDArray[np.uint8], seed: int, epoch: int, samples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Augment a batch.

        :param images: uint8 ``[n, channels, height, width]``, not changed
        :param samples: int64 ``[n]``, the images' indices in the data set
        :returns: a new uint8 array of the same shape
        """
        n, channels, height, width = images.shape
        down, right, mirrored = self.draw(seed, epoch, samples)
        border = self.shift
        canvas = np.full((n, channels, height + 2 * border, width + 2 * border), self.fill, np.uint8)
        canvas[:, :, border : border + height, border : border + width] = images
        windows = sliding_window_view(canvas, (height, width), axis=(2, 3))  # every position of the frame on the canvas
        result = windows[np.arange(n), :, down, right]
        result[mirrored] = result[mirrored][..., ::-1]
        return result


NO_AUGMENTATION = Augmentation()
