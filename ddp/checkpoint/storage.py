"""The checkpoints of a run on disk: ddp/checkpoint/directory.py with the trainer's manifest, names and error messages.

    RUN_DIR/checkpoints/epoch-0003-step-00000123/    epochs complete, optimizer steps done
        model.pt          state dict of the plain module
        optimizer.pt      state dict of the optimizer
        ranks.pt          a list: for each rank, what differs between ranks
        rank-0-of-2.pt    of a sharded model, instead of the first two: each rank's part of both, see pieces.py
        manifest.json     the run's facts: see Manifest below
        SHA256SUMS        a digest of each file above

All of this is for rank 0 or for a process that is alone; nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from common.errors import UsageError
from common.files.run_directory import CHECKPOINT_FOLDER, writing
from ddp.checkpoint import directory, folder
from ddp.checkpoint.folder import FORMATS, MANIFEST, Checkpoint, Damaged, wrong_field
from ddp.checkpoint.pieces import is_sharded, shard_files

FOLDER = CHECKPOINT_FOLDER
KINDS: dict[str, type] = {"model": dict, "optimizer": dict, "ranks": list}  # what each of the files KIND.pt holds


def name_of(epoch: int, step: int) -> str:
    """The folder of the checkpoint with so many complete epochs and steps."""
    return f"epoch-{epoch:04d}-step-{step:08d}"


@dataclass(frozen=True)
class Manifest:
    """The facts of a run's checkpoint, in JSON's types: a tuple would come back as a list; floats come back bit for bit.

    :param step: optimizer steps done, over all epochs
    :param epoch: complete epochs
    :param step_in_epoch: steps done in the epoch that is not complete; 0 at an epoch's end
    :param world_size: ranks that wrote it, each with its entry in ``ranks.pt``
    :param batch_size: samples per step over all ranks and micro-steps
    :param dataset_length: samples in the training set
    :param dataset_fingerprint: digest of the training set
    :param model: name by which it is built
    :param optimizer: name by which it is built
    :param config: the run's settings
    :param progress: the scaler's state, the metrics of the present epoch, ``accuracy`` (of the last evaluation), and
        ``best``, None or a checkpoint's ``{"name": str, "accuracy": float}``
    :param versions: of the software that wrote it
    :param extra: anything else that a run of one's own needs
    :param files: bytes of each file; filled in when it is read
    """

    step: int
    epoch: int
    step_in_epoch: int
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
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder. Names sort in time."""
        return name_of(self.epoch, self.step)

    def other_data(self, length: int, fingerprint: str) -> str | None:
        """How a training set differs from that of the run, or None."""
        if (length, fingerprint) == (self.dataset_length, self.dataset_fingerprint):
            return None
        return f"{self.dataset_length} training samples with digest {self.dataset_fingerprint}, not {length} with {fingerprint}"

    def facts(self) -> dict[str, Any]:
        """All but the step and the files, which every checkpoint has."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("step", "files")}


def manifest_in(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a verified checkpoint.

    :raises Damaged: when its facts or files are not those of a run: a forged manifest can have a matching digest
    """
    path, files = checkpoint.path, checkpoint.files
    types = {name: typing.get_origin(hint) or hint for name, hint in typing.get_type_hints(Manifest).items()}
    del types["step"], types["files"]
    if problem := wrong_field(checkpoint.facts, types):
        raise Damaged(path, f"{MANIFEST} {problem}")
    manifest = Manifest(step=checkpoint.step, files=files, **checkpoint.facts)
    from ddp.checkpoint.contents import wrong_progress  # only when something is read

    if problem := wrong_progress(manifest.progress):
        raise Damaged(path, f"{MANIFEST} {problem}")
    if path.name != manifest.name:
        raise Damaged(path, f"{MANIFEST} is that of {manifest.name}")
    # Of a sharded model, one of each rank. (Counted first: a forged number may be large.)
    is_sharded = (
        len(files) == manifest.world_size + 1 and {*shard_files(manifest.world_size), "ranks.pt"} == files.keys()
    )
    if not is_sharded and (missing := {f"{kind}.pt" for kind in KINDS} - files.keys()):
        raise Damaged(path, f"{MANIFEST} lists the files {sorted(files)} without {sorted(missing)}")
    return manifest


def write(run_dir: Path, manifest: Manifest, contents: dict[str, Any]) -> Path:
    """Write a checkpoint; one of the same name is replaced.

    :param contents: ``model``, ``optimizer`` and ``ranks``, and more if a run of one's own has more
    :returns: the checkpoint's folder
    :raises UsageError: when it cannot be written; earlier checkpoints are untouched
    """
    with writing(run_dir / FOLDER / manifest.name):
        return directory.save(run_dir / FOLDER, manifest.step, contents, manifest.facts(), name=manifest.name)


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint, and that it is one of a run.

    :raises Damaged: when it is not as it was written, or cannot be read
    :raises UsageError: when it has another format
    """
    return manifest_in(folder.verify(path))


def read(path: Path, kind: str) -> Any:
    """A file of a verified checkpoint, its tensors on the CPU; nothing in it is executed.

    :param kind: ``"model"``, ``"optimizer"`` or ``"ranks"``, or what else was written; of a sharded checkpoint, put together
    :raises Damaged: when it holds something else: a forged file can have a matching digest
    """
    if kind in ("model", "optimizer") and is_sharded(path):
        from ddp.checkpoint.shards import assembled

        return assembled(path, kind)
    content = folder.load(path, kind)
    expected = KINDS.get(kind, object)
    if not isinstance(content, expected):
        raise Damaged(path, f"{kind}.pt holds a {type(content).__name__} instead of a {expected.__name__}")
    return content


def load_weights(network: nn.Module, path: Path) -> None:
    """Copy a verified checkpoint's weights into a network, on any device.

    They are read onto the CPU and copied from there, so that no device ever holds them twice (pytorch#23138).

    :raises Damaged: when they are those of another kind of network
    :raises UsageError: when the network was built for other data: other classes, or other images
    """
    from ddp.checkpoint.contents import wrong_tensors  # only when something is read

    weights, expected = read(path, "model"), network.state_dict()
    if problem := wrong_tensors(weights, expected, shapes=False):
        raise Damaged(path, f"model.pt {problem}")
    if problem := wrong_tensors(weights, expected):
        raise UsageError(
            f"{path} was trained on other data than is there now, with other classes or images (it {problem}): give its "
            "--data-dir"
        )
    network.load_state_dict(weights)


def all_of(run_dir: Path) -> list[Path]:
    """A run's checkpoints by their names alone, oldest first; some may be damaged.

    :raises UsageError: when there are none but those of format 1, or the folder cannot be read
    """
    parent = run_dir / FOLDER
    found = directory.list_checkpoints(parent)
    if not found and parent.is_dir() and any(re.fullmatch(r"step-\d{8}\.pt", name) for name in os.listdir(parent)):
        raise UsageError(
            f"{parent} holds checkpoints of the older format 1, this version reads {FORMATS}: use the one that wrote them, "
            "or start again with --overwrite"
        )
    return found


def newest(run_dir: Path, *, set_aside: bool = False) -> tuple[Path, Manifest] | None:
    """A run's newest checkpoint that is whole; damaged ones are reported and passed over.

    :param set_aside: rename these to ``damaged-...``; for the process that writes into the run
    :returns: its folder and manifest, or None when the run has no checkpoint at all
    :raises UsageError: when all are damaged, or the newest that is not damaged has another format
    """
    with writing(run_dir / FOLDER):
        return directory.newest_of(
            all_of(run_dir),
            lambda path: (path, verify(path)),
            set_aside=set_aside,
            remedy="or start again with --overwrite",
        )


def prune(run_dir: Path, keep_last: int, best: str | None) -> None:
    """Remove all checkpoints but the newest ``keep_last`` (at least 1) and the one named ``best``.

    :raises UsageError: when they cannot be removed
    """
    with writing(run_dir / FOLDER):
        directory.prune(run_dir / FOLDER, keep_last, () if best is None else (best,))


def clean(run_dir: Path) -> None:
    """Remove what a killed process left half written or half removed; for the process that writes into the run.

    :raises UsageError: when it cannot be removed
    """
    with writing(run_dir / FOLDER):
        directory.clean(run_dir / FOLDER)
