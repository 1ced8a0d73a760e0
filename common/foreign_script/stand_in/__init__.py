"""A stand-in for GPUs: a script that names CUDA runs on CPU ranks, unchanged.

It takes the place of torch's Python functions that take a device, right after torch has been imported. Tensors stay on the CPU.
``torch.device("cuda")`` needs no driver, so it stays what it is until one of these functions gets it: what a script decides by
its devices, by ``is_available()`` or by the backend, it decides as on a GPU.

It cannot show what only a GPU does: kernels of its own, asynchronous errors, or the failure of an operation between the CPU and a GPU.
It is loaded under another name than its own, and imports nothing of the project but its own modules.
"""

from __future__ import annotations


def install() -> None:
    """Take the functions' place. torch has been imported, and the script's first line that uses it has not run yet."""
    from . import amp, arguments, cuda, distributed, loading, randomness, tensors  # noqa: F401
