"""Watch an audited script from within each of its processes, and write down what happens, one JSON object a line.

It imports nothing else of this project, so that it sees the script's own modules by their names. It lets watchers look at the
calls of some of torch's functions; they draw no random number, send nothing, and change no tensor.
"""

from __future__ import annotations

import importlib

PARTS = ("collectives", "enlarge", "files", "gradients", "loaders", "losses", "optimizers", "randomness", "wrappers")


def install() -> None:
    """Begin to watch. torch has been imported, and the script's first line that uses it has not run yet."""
    from .event_types import NotWatched
    from .events import emit

    for part in PARTS:
        try:
            importlib.import_module(f".{part}", __package__)
        except (ImportError, AttributeError) as error:
            emit(NotWatched(name=f"{error} (so nothing of watch/{part}.py)"))
