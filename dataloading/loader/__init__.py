"""Two loaders of image files: :class:`FastLoader`, and torch's own (``stock_loader``).

``from dataloading.loader import FastLoader`` is the short way to the fast loader.
"""

from dataloading.loader.fast_loader import FastLoader

__all__ = ["FastLoader"]
