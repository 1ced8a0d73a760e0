"""A folder of JPEG files as a data set: names, storage, decoders, augmentation, batches.

``from dataloading.dataset import LFWBatches, LFWDataset`` is the short way to the two data sets. They are imported on first
use, so that the light modules of this package stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloading.dataset.batches import LFWBatches
    from dataloading.dataset.lfw import LFWDataset

__all__ = ["LFWBatches", "LFWDataset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dataloading.dataset import batches

        return getattr(batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
