"""The error for what a user can correct: its message is the whole report."""

from __future__ import annotations


class UsageError(Exception):
    """A user error. The message names the flag or file, the value, and what to do.

    ``seen_by_all`` is True if every rank is known to have raised it (see ``DistEnv.fail_together``).
    """

    seen_by_all = False
