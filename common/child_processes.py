"""Processes below this one: found, and ended with all that they have started."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

END_S = 5.0  # for processes to end by themselves
MOST_ROUNDS = 3  # of kills; a process that a driver holds in the kernel cannot be waited for
PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)


def adopt_orphans(adopt: bool = True) -> None:
    """Let processes whose parent ends become children of this one, where Linux can: so they are found, and ended.

    :param adopt: False for no longer. Somebody else's process, such as pytest's, would not wait for them, and they stay as zombies
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def descendants() -> set[psutil.Process]:
    """All processes below this one."""
    import psutil  # not for --help

    return set(psutil.Process().children(recursive=True))


def end_all_but(before: set[psutil.Process], patiently: bool) -> int:
    """SIGKILL all processes below this one that were not there before.

    :param patiently: give them a few seconds to end by themselves
    :returns: how many did not
    """
    import psutil

    _, alive = psutil.wait_procs(descendants() - before, timeout=END_S if patiently else 0)
    for _ in range(MOST_ROUNDS):  # one that is killed may just have started another
        processes = descendants() - before
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=END_S)
    return len(alive)
