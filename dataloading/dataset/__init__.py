"""A folder of image files as a data set: names, storage, decoders, augmentation, batches.

``from dataloading.dataset import ImageFolder, LFWBatches, LFWDataset`` is the short way to the data sets. They are imported on
first use, so that the light modules of this package stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloading.dataset.batches import LFWBatches
    from dataloading.dataset.image_folder import ImageFolder
    from dataloading.dataset.lfw import LFWDataset

__all__ = ["ImageFolder", "LFWBatches", "LFWDataset"]

_MODULES = {"ImageFolder": "image_folder", "LFWBatches": "batches", "LFWDataset": "lfw"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
