"""What watches an audited script from within each of its processes, and writes down what happens, one JSON object a line.

It imports nothing else of this project, so that it sees the script's own modules by their names. It replaces functions of torch
by ones that write down the call and then do the same; it draws no random number, sends nothing, and changes no tensor.
"""

from __future__ import annotations


def install() -> None:
    """Begin to watch. torch has been imported, and the script's first line that uses it has not run yet."""
    from . import collectives, files, gradients, loaders, losses, optimizers, randomness, wrappers

    for module in (wrappers, gradients, losses, optimizers, loaders, randomness, collectives, files):
        module.install()
