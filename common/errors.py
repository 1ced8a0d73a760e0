"""The error for what a user can correct: its message is the whole report."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text with a space for each control character: what an error quotes may come from a file or a server."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


class UsageError(Exception):
    """A user error. The message names the flag or file, the value, and what to do.

    ``seen_by_all`` is True if every rank is known to have raised it (see ``DistEnv.fail_together``).
    """

    seen_by_all = False
