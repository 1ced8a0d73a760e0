"""Watch the loaders of a script from within each of its processes, and write down what they do; or try settings of one there.

It imports nothing else of this project, so that the script finds its own modules by their names. It draws no random number, and
hands on each batch, index and exception as it is.
"""

from __future__ import annotations

import faulthandler
import os
import signal


def install() -> None:
    """Begin to watch. torch has been imported, and the script's first line that uses it has not run yet."""
    if "LOADER_DOCTOR_ADDRESS" in os.environ:
        from . import rehearsal  # noqa: F401  it takes the place of torch's functions
    else:
        from . import fetching, loaders  # noqa: F401  they do, too


def begin(directory: str) -> None:
    """Watch this process, too, from now on."""
    install()
    from . import events, loaders, sampling

    events.begin(directory)
    loaders.numbers.clear()
    sampling.sampler.forget()


def end() -> None:
    """Watch no more, and leave no signal's handler and no open file."""
    from . import events, sampling

    faulthandler.unregister(signal.SIGUSR2)
    sampling.sampler.finish()
    events.begin(None)
