"""Stop signals: during the imports (early_signals.py), and as requests to a job (stop_request.py)."""

import sys


def handle_signals_of_a_command(requeued: str | None = None) -> None:
    """Let a stop signal end this process in a line, if ``python -m`` imports a package, to run one of its modules.

    :param requeued: the package's module that a scheduler starts again after a signal
    """
    if sys.argv[:1] == ["-m"]:
        from common.signals.early_signals import handle_signals  # only in a command

        handle_signals(requeued)
