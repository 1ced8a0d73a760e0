"""The checkpoints of a run on disk: ddp/checkpoint/directory.py with the trainer's manifest and names.

    RUN_DIR/checkpoints/epoch-0003-step-00000123/    epochs complete, optimizer steps done
        model.pt          state dict of the plain module
        optimizer.pt      state dict of the optimizer
        ranks.pt          a list: for each rank, what differs between ranks
        rank-0-of-2.pt    of a sharded model, instead of the first two: each rank's part of both, see shards.py
        manifest.json     the run's facts: see Manifest below
        SHA256SUMS        a digest of each file above

All of this is for rank 0 or for a process that is alone; nothing here communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from common.errors import UsageError
from common.files.run_directory import CHECKPOINT_FOLDER, CONFIG_FILE, writing
from ddp.checkpoint import directory, folder
from ddp.checkpoint.folder import MANIFEST, Checkpoint, Damaged
from ddp.checkpoint.shards import shard_keys, whole_weights

FOLDER = CHECKPOINT_FOLDER
KINDS = ("model", "optimizer", "ranks")  # each is a file KIND.pt
BEST = "best"
CHOICE = f"name of one, or {BEST} (default: the newest that is whole)"


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
    :param dataset_length: samples in the training set
    :param dataset_fingerprint: digest of the training set
    :param config: the run's settings
    :param progress: the scaler's state, the metrics of the present epoch, ``accuracy`` (of the last evaluation), and
        ``best``, None or a checkpoint's ``{"name": str, "accuracy": float}``
    :param versions: of the software that wrote it
    """

    step: int
    epoch: int
    step_in_epoch: int
    world_size: int
    dataset_length: int
    dataset_fingerprint: str
    config: dict[str, Any]
    progress: dict[str, Any]
    versions: dict[str, str]

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder. Names sort in time."""
        return name_of(self.epoch, self.step)

    def other_data(self, length: int, fingerprint: str) -> str | None:
        """How a training set differs from that of the run, or None."""
        if (length, fingerprint) == (self.dataset_length, self.dataset_fingerprint):
            return None
        return f"{self.dataset_length} training samples with digest {self.dataset_fingerprint}, not {length} with {fingerprint}"

    @property
    def best(self) -> str | None:
        """Name of the checkpoint that was the best of its run when this one was written."""
        best: dict[str, Any] | None = self.progress["best"]
        return best["name"] if best else None

    def facts(self) -> dict[str, Any]:
        """All but the step, which every checkpoint has."""
        return {name: value for name, value in vars(self).items() if name != "step"}


class RunCheckpoint(NamedTuple):
    """A run's checkpoint that is whole: its folder, and the manifest in it."""

    path: Path
    manifest: Manifest


def manifest_in(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a verified checkpoint.

    :raises Damaged: when it is not one of a run
    """
    try:
        manifest = Manifest(step=checkpoint.step, **checkpoint.facts)
        name = manifest.name
    except (TypeError, ValueError) as error:
        raise Damaged(checkpoint.path, f"{MANIFEST} is not one of a run") from error
    if checkpoint.path.name != name:
        raise Damaged(checkpoint.path, f"{MANIFEST} is that of {name}")
    return manifest


def write(run_dir: Path, manifest: Manifest, contents: dict[str, Any]) -> Path:
    """Write a checkpoint; one of the same name is replaced.

    :param contents: ``model``, ``optimizer`` and ``ranks``
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

    :param kind: one of :data:`KINDS`. The model of a sharded checkpoint is put together
    :raises Damaged: when it cannot be loaded
    """
    if kind == "model" and shard_keys(path):
        return whole_weights(path)
    return folder.load(path, kind)


def load_weights(network: nn.Module, path: Path) -> None:
    """Copy a verified checkpoint's weights into a network, on any device.

    They are read onto the CPU and copied from there, so that no device ever holds them twice (pytorch#23138).

    :raises UsageError: when they are those of another network, or of other data: other classes, or other images
    """
    weights = read(path, "model")
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        _, problem, *_ = [*str(error).splitlines(), ""]  # below a title
        raise UsageError(
            f"{path} was trained on other data than is there now, with other classes or images, or is of another model "
            f"({problem.strip()}): give its --data-dir"
        ) from error


def newest(run_dir: Path, *, set_aside: bool = False) -> RunCheckpoint | None:
    """A run's newest checkpoint that is whole; damaged ones are reported and passed over.

    :param set_aside: rename these to ``damaged-...``; for the process that writes into the run
    :returns: None when the run has no checkpoint at all
    :raises UsageError: when all are damaged, or the newest that is not damaged has another format
    """
    with writing(run_dir / FOLDER):
        checkpoint = directory.newest(run_dir / FOLDER, set_aside=set_aside, remedy="or start again with --overwrite")
    return RunCheckpoint(checkpoint.path, manifest_in(checkpoint)) if checkpoint else None


def existing(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, oldest first, whole or damaged.

    :raises UsageError: when there is none
    """
    paths = directory.list_checkpoints(run_dir / FOLDER)
    if not paths:
        held = "no checkpoint yet" if (run_dir / CONFIG_FILE).is_file() else "no run"
        raise UsageError(f"--run-dir {run_dir} holds {held}: name the directory of a run that has written one")
    return paths


def choose(run_dir: Path, name: str | None) -> RunCheckpoint:
    """A checkpoint whose every byte was checked.

    :param name: its name, :data:`BEST`, or None for the newest that is whole
    :raises UsageError: when there is no such checkpoint, or it is damaged
    """
    paths = {path.name: path for path in existing(run_dir)}
    if name is None or name == BEST:
        newest_one = newest(run_dir)
        assert newest_one is not None  # because there are paths
        if name is None:
            return newest_one
        name = newest_one.manifest.best
        if name is None:
            raise UsageError(f"--checkpoint {BEST}: the run has evaluated none yet; leave it out to take the newest")
    if name not in paths:
        raise UsageError(f"--checkpoint {name}: there is only {', '.join(paths)}")
    return RunCheckpoint(paths[name], verify(paths[name]))
