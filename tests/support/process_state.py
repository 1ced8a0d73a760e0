"""State that a function may leave behind in a process that goes on: reset, or found and named.

Ranks of tests are used by many functions (:mod:`tests.support.ranks`). What a program sets anew at every start is reset after each.
Anything else that stays is reported, so that no test passes or fails because of one before it.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

OURS = ("common", "dataloading", "dataparallel", "ddp", "tests")
PATCHED = (
    "os",
    "time",
    "signal",
    "socket",
    "subprocess",
)  # not torch, which changes itself when more of it is imported
WAITING = ("tqdm_monitor",)  # threads that stay, and do nothing
END_S = 30.0  # for threads and children that are just ending


class ProcessState:
    """A process as it is now."""

    def __init__(self) -> None:
        self._environment, self._folder, self._arguments = dict(os.environ), os.getcwd(), list(sys.argv)
        self._warnings = list(warnings.filters)
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._torch = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._excepthook = sys.excepthook
        self._loggers = {logger: (logger.level, logger.propagate, list(logger.handlers)) for logger in _loggers()}
        self._threads = set(threading.enumerate())
        self._found = _lasting()

    def restore(self) -> list[str]:
        """Reset what a program sets at its start; what has changed beyond that, in words."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:] = self._arguments
        warnings.filters[:] = self._warnings  # type: ignore[index]
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        dtype, threads, grad = self._torch
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(self._deterministic)
        sys.excepthook = self._excepthook  # init_process_group sets its own
        for logger in _loggers():
            logger.level, logger.propagate, handlers = self._loggers.get(logger, (logging.NOTSET, True, []))
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers[:] = handlers
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # of which logger is enabled for which level
        left = []
        if dist.is_initialized():
            left.append("a process group")
        gc.collect()
        left += [f"a thread, {name}" for name in self._threads_left()]
        left += [f"a child process, {name}" for name in _children_left()]
        now = _lasting()
        left += [f"another {name}" for name, value in self._found.items() if now.get(name, value) is not value]
        return left

    def _threads_left(self) -> list[str]:
        deadline = time.monotonic() + END_S
        threads = [
            thread for thread in threading.enumerate() if thread not in self._threads and thread.name not in WAITING
        ]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]


def _children_left() -> list[str]:
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=END_S)
    return [" ".join(process.cmdline()) for process in alive]


def _loggers() -> list[logging.Logger]:
    found = [logging.root, *logging.root.manager.loggerDict.values()]
    return [logger for logger in found if isinstance(logger, logging.Logger)]


def _lasting() -> dict[str, Any]:
    """State that lasts in a process until it is changed back: values by name. They are compared by identity."""
    found: dict[str, Any] = {f"handler of {number.name}": signal.getsignal(number) for number in signal.Signals}
    found |= {f"sys.{name}": getattr(sys, name) for name in ("stdout", "stderr", "unraisablehook")}
    found |= {f"signal mask ({number})": True for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OURS or name in PATCHED:
            found |= _attributes(name, module)
    return found


def _attributes(name: str, module: types.ModuleType) -> dict[str, Any]:
    """The variables of a module, and the attributes of its classes."""
    found = {}
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        found[f"{name}.{key}"] = value
        if name.partition(".")[0] in OURS and isinstance(value, type) and value.__module__ == name:
            found |= {f"{name}.{key}.{k}": v for k, v in list(vars(value).items()) if not k.startswith("_")}
    return found
