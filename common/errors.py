"""The error for what a user can correct: its message is the whole report."""

from __future__ import annotations


def printable(name: str) -> str:
    """A name as it can be printed and drawn: escapes for control characters, and for bytes of a path that are no UTF-8."""
    return "".join(c if c.isprintable() else _byte(c) or c.encode("unicode_escape").decode() for c in name)


def one_line(text: str) -> str:
    """The text with a space for each control character: what an error quotes may come from a file or a server."""
    return " ".join("".join(c if c.isprintable() else _byte(c) or " " for c in text).split())


def _byte(character: str) -> str | None:
    """The escape of a byte of a path that is no UTF-8, for which Python has a surrogate; None for another character."""
    number = ord(character) - 0xDC00
    return f"\\x{number:02x}" if 0x80 <= number <= 0xFF else None


class UsageError(Exception):
    """A user error. The message names the flag or file, the value, and what to do.

    ``seen_by_all`` is True if every rank is known to have raised it (see ``DistEnv.fail_together``). ``about`` says what it is
    about, if ranks may raise it with other numbers: one of them prints it.
    """

    seen_by_all = False
    about: str | None = None


def leaves_together(error: BaseException | None) -> bool:
    """Whether all ranks are known to leave a block as this one does: without an error, or with one that all have raised."""
    return error is None or getattr(error, "seen_by_all", False)
