"""One checkpoint: a folder of which every byte can be checked.

    model.pt          one file per entry of the state, in torch.save's format
    optimizer.pt
    manifest.json     the step, the caller's facts, and the size of each file above
    SHA256SUMS        a digest of each file above; `sha256sum -c SHA256SUMS` checks them

The digests are computed from the files as they are read back. They find what a disk does later (``torch.load`` ignores the
checksums of its own format). Nothing in a file is executed (``weights_only=True``).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UsageError
from common.files.atomic_files import new_file, sync_folder

# Raise it with every change of the manifest below, of the trainer's (ddp/checkpoint/storage.py), or of shards.
FORMAT = 5
MANIFEST, DIGESTS = "manifest.json", "SHA256SUMS"
CHUNK = 1 << 20  # bytes hashed at a time

_KEY = re.compile(r"\w[\w-]*", re.ASCII)  # of a state's entry: never a path such as ../elsewhere
_DIGEST_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)\n", re.ASCII)


class Damaged(UsageError):
    """A checkpoint is not as it was written; the message names its path and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.problem}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was checked.

    :param path: its folder
    :param step: the number it was saved with
    :param facts: the caller's own, from JSON: a tuple comes back as a list, floats come back bit for bit
    """

    path: Path
    step: int
    facts: dict[str, Any]


def write_entry(folder: Path, key: str, content: Any) -> tuple[int, str]:
    """Write one entry of a state as a file of this folder, and sync it to the disk.

    :returns: its size in bytes and its digest, as it is read back
    :raises OSError: when it cannot be written
    :raises TypeError: when it could not be loaded again
    :raises ValueError: for a key that is no plain word
    """
    import torch  # see load

    if not _KEY.fullmatch(key):
        raise ValueError(f"state {key!r} cannot be a file's name: use letters, digits, _ and -")
    path = folder / f"{key}.pt"
    with new_file(path) as file:
        save_tensors(file, content)
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mapped: no tensor is read
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise TypeError(f"state {key!r} holds what torch.load(weights_only=True) refuses: {reason}") from error
    return size_and_digest(path)


def complete(folder: Path, step: int, facts: Mapping[str, Any], entries: Mapping[str, tuple[int, str]]) -> None:
    """Write the manifest and the digests of entries that have been written, and sync them to the disk.

    :param entries: by key, what :func:`write_entry` returned, in this process or in another
    :raises OSError: when they cannot be written
    """
    files = {f"{key}.pt": size for key, (size, _) in entries.items()}
    digests = {f"{key}.pt": digest for key, (_, digest) in entries.items()}
    manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
    with new_file(folder / MANIFEST) as file:
        file.write((json.dumps(manifest, indent=2) + "\n").encode("ascii"))
    _, digests[MANIFEST] = size_and_digest(folder / MANIFEST)
    with new_file(folder / DIGESTS) as file:
        file.write(_digest_lines(digests))
    sync_folder(folder)


def verify(path: str | Path) -> Checkpoint:
    """Check every byte of a checkpoint; files that it does not list are ignored.

    :raises Damaged: when it is not as it was written, or cannot be read
    :raises UsageError: when it has another format. Every format keeps ``format`` in ``manifest.json``, with the digest in
        ``SHA256SUMS``, so that it is not mistaken for damage.
    """
    path = Path(path)
    lines = _read(path, DIGESTS)
    digests = {name: digest for digest, name in _DIGEST_LINE.findall(lines.decode("ascii", errors="replace"))}
    if not digests or _digest_lines(digests) != lines:
        raise Damaged(path, f"{DIGESTS} has other content than was written")
    encoded = _read(path, MANIFEST)
    if hashlib.sha256(encoded).hexdigest() != digests.get(MANIFEST):
        raise Damaged(path, f"{MANIFEST} has other content than was written (SHA-256)")
    manifest = _parse_manifest(path, encoded)
    files: dict[str, int] = manifest["files"]
    if digests.keys() != {*files, MANIFEST}:
        raise Damaged(path, f"{DIGESTS} lists {sorted(digests)} instead of {sorted([*files, MANIFEST])}")
    for name, size in files.items():
        try:
            actual_size, digest = size_and_digest(path / name)
        except OSError as error:
            raise Damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if actual_size != size:
            raise Damaged(path, f"{name} has {actual_size} bytes instead of {size}")
        if digest != digests[name]:
            raise Damaged(path, f"{name} has other content than was written (SHA-256)")
    return Checkpoint(path, manifest["step"], manifest["facts"])


def load(path: str | Path, key: str, *, mapped: bool = False) -> Any:
    """Read one entry of a verified checkpoint's state, its tensors on the CPU; nothing in it is executed.

    :param mapped: map the file instead of reading it; the tensors must not be written to
    :raises Damaged: when it cannot be loaded
    """
    import torch  # here, so that a program may import this module without torch

    path = Path(path)
    try:
        return torch.load(path / f"{key}.pt", map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # its type depends on what the file holds
        raise Damaged(path, f"{key}.pt cannot be loaded ({type(error).__name__})") from error


def save_tensors(file: BinaryIO, content: Any) -> None:
    """``torch.save`` into an open file, with the errors of that file.

    :raises OSError: when it cannot be written; a part of it may be
    """
    import torch  # see load

    try:
        torch.save(content, file)
        return
    except RuntimeError as error:
        # If write raises, or a signal handler within it, torch may complain about the unfinished archive instead.
        if not isinstance(error.__context__, OSError | KeyboardInterrupt | SystemExit):
            raise
        cause: BaseException = error.__context__
    raise cause  # outside the handler, so that torch's complaint is not shown with it


def size_and_digest(path: Path) -> tuple[int, str]:
    """The bytes of a file and their SHA-256 in hex digits.

    :raises OSError: when it cannot be read
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()


def _digest_lines(digests: Mapping[str, str]) -> bytes:
    """The content of ``SHA256SUMS``, with the digest of each file."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode("ascii")


def _parse_manifest(path: Path, encoded: bytes) -> dict[str, Any]:
    """The manifest, whose digest was right; it may still be another version's. No other content is doubted: with right digests, any
    content can be written."""
    try:
        manifest: dict[str, Any] = json.loads(encoded)
        version, step = manifest["format"], manifest["step"]
        of_another_step = not path.name.endswith(f"step-{step:08d}")
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise Damaged(path, f"{MANIFEST} is not one of a checkpoint") from error
    if version != FORMAT:
        raise UsageError(f"{path} has the format {version}, this version reads {FORMAT}: use the one that wrote it")
    if of_another_step:
        raise Damaged(path, f"{MANIFEST} is that of step {step}")
    return manifest


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise Damaged(path, f"{name} cannot be read ({error.strerror})") from error
