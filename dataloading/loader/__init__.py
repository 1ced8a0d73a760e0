"""Two loaders of image files: :class:`FastLoader`, and torch's own (``stock_loader``).

``from dataloading.loader import FastLoader`` is the short way to the fast loader. It is imported on first use, so that
importing a single module of this package stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloading.loader.fast_loader import FastLoader

__all__ = ["FastLoader"]


def __getattr__(name: str) -> Any:
    if name == "FastLoader":
        from dataloading.loader.fast_loader import FastLoader

        return FastLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
