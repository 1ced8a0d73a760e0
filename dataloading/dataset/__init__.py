"""Image files as a data set: names, storage, decoders, augmentation, batches.

``from dataloading.dataset import ImageBatches, ImageFolder, LFWDataset`` is the short way to the data sets.
"""

from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.image_folder import ImageFolder
from dataloading.dataset.lfw import LFWDataset

__all__ = ["ImageBatches", "ImageFolder", "LFWDataset"]
