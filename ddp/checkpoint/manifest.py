"""What a checkpoint says of itself: the run that it belongs to, and what its files must be.

The manifest is JSON, for people to read, and has its own SHA-256 in it. So what a disk did to it is told from what a newer
version wrote, and nothing of a damaged one is believed.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import stat
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UsageError

FORMAT = 2
MANIFEST = "manifest.json"
KINDS: dict[str, type] = {"model": dict, "optimizer": dict, "ranks": list}  # what each of the files KIND.pt holds
CHUNK = 1 << 20  # bytes hashed at a time


class Damaged(UsageError):
    """One checkpoint that is not as it was written; the message has its path and what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.problem}"


def name_of(epoch: int, step: int) -> str:
    """The folder of the checkpoint with so many complete epochs and steps."""
    return f"epoch-{epoch:04d}-step-{step:08d}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, in JSON's types: a tuple would come back as a list; floats come back bit for bit.

    :param step: optimizer steps done, over all epochs; :param epoch: epochs complete
    :param position: steps done in the epoch that is not complete; 0 at an epoch's end
    :param world_size: ranks that wrote it, each with its entry in ``ranks.pt``
    :param batch_size: samples per step over all ranks and micro-steps
    :param dataset_length: samples in the training set; :param dataset_fingerprint: tells it from other data
    :param model: :param optimizer: the names by which they are built
    :param config: the run's settings
    :param progress: what else the run goes on from: the scaler's state, the metrics so far, ``accuracy`` (of the last
        evaluation) and ``best``, None or a checkpoint's ``{"name": str, "accuracy": float}``
    :param versions: of the software that wrote it
    :param files: for each file ``{"bytes": int, "sha256": hex digits}``; :func:`ddp.checkpoint.storage.write` fills it in
    """

    step: int
    epoch: int
    position: int
    seed: int
    world_size: int
    batch_size: int
    grad_accumulation_steps: int
    dataset: str
    dataset_length: int
    dataset_fingerprint: str
    model: str
    optimizer: str
    config: dict[str, Any]
    progress: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def name(self) -> str:
        """Of the checkpoint's folder. Names sort in time."""
        return name_of(self.epoch, self.step)


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``, with the digest over all else in it."""
    content = dataclasses.asdict(manifest)
    return _spelled({**content, "digest": _digest_of(content)})


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the folder ``path``; the files that it names are not looked at.

    :raises Damaged: when it is not as it was written, or cannot be read
    :raises UsageError: when a newer version wrote it. Every format keeps ``format`` and ``digest`` in a JSON manifest, so
        that a newer one is told from a damaged one.
    """
    try:
        with _open(path / MANIFEST) as file:
            encoded = file.read()
    except OSError as error:
        raise Damaged(path, f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        content = json.loads(encoded)
        if not isinstance(content, dict):
            raise Damaged(path, f"{MANIFEST} is not one of a checkpoint")
        rest = {name: value for name, value in content.items() if name != "digest"}
        intact = content.get("digest") == _digest_of(rest)
        same_bytes = encoded == _spelled(content)  # JSON has many spellings of the same, but we write only one
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{MANIFEST} is not JSON") from error
    found = content.get("format")
    if intact and type(found) is int and found > FORMAT:
        raise UsageError(f"{path} has format {found}, this version reads {FORMAT}: use the one that wrote it")
    if not (intact and same_bytes):
        raise Damaged(path, f"{MANIFEST} has other content than was written (SHA-256)")
    if problem := _wrong_field(rest):
        raise Damaged(path, f"{MANIFEST} {problem}")
    return Manifest(**rest)


def facts_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file: ``{"bytes": int, "sha256": hex digits}``.

    :raises OSError: when it cannot be read
    """
    size, digest = 0, hashlib.sha256()
    with _open(path) as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            digest.update(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _wrong_field(content: dict[str, Any]) -> str | None:
    """What is wrong with a manifest's fields, if anything; its digest says that somebody meant them so."""
    types = {name: typing.get_origin(hint) or hint for name, hint in typing.get_type_hints(Manifest).items()}
    if content.keys() != types.keys():
        return f"lacks or adds {sorted(content.keys() ^ types.keys())}"
    for name, kind in types.items():
        if type(content[name]) is not kind:  # exactly: True is no int here
            return f"has {name} {content[name]!r}, which is no {kind.__name__}"
    if content["format"] != FORMAT:
        return f"has format {content['format']}"
    names = {f"{kind}.pt" for kind in KINDS}  # and nothing like ../../elsewhere
    if content["files"].keys() != names:
        return f"names the files {sorted(content['files'])} instead of {sorted(names)}"
    for name, facts in content["files"].items():
        shape = {key: type(value) for key, value in facts.items()} if isinstance(facts, dict) else None
        if shape != {"bytes": int, "sha256": str}:
            return f"has no size and SHA-256 of {name}"
    return None


def _spelled(content: dict[str, Any]) -> bytes:
    """The bytes of ``manifest.json``."""
    return (json.dumps(content, indent=2) + "\n").encode("ascii")


def _digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its own digest, whatever its layout and the order of its fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def _open(path: Path) -> BinaryIO:
    """:raises OSError: also for what is no regular file: opening a pipe would wait for its other end"""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    return open(path, "rb")
