"""A folder of image files as a data set: names, storage, decoders, augmentation, batches.

``from dataloading.dataset import ImageFolder, LFWBatches, LFWDataset`` is the short way to the data sets.
"""

from dataloading.dataset.batches import LFWBatches
from dataloading.dataset.image_folder import ImageFolder
from dataloading.dataset.lfw import LFWDataset

__all__ = ["ImageFolder", "LFWBatches", "LFWDataset"]
