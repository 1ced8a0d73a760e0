"""What the trainer writes into a checkpoint's ``manifest.json``: the run that it belongs to, and how far that is."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from ddp.checkpoint.folder import MANIFEST, Checkpoint, Damaged, wrong_field

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

    def facts(self) -> dict[str, Any]:
        """All but the step and the files, which every checkpoint has."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("step", "files")}


def manifest_in(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a verified checkpoint.

    :raises Damaged: when its facts or files are not those of a run: whoever forges a manifest can forge its digest too
    """
    path, files = checkpoint.path, checkpoint.files
    types = {name: typing.get_origin(hint) or hint for name, hint in typing.get_type_hints(Manifest).items()}
    del types["step"], types["files"]
    if problem := wrong_field(checkpoint.facts, types):
        raise Damaged(path, f"{MANIFEST} {problem}")
    manifest = Manifest(step=checkpoint.step, files=files, **checkpoint.facts)
    if path.name != manifest.name:
        raise Damaged(path, f"{MANIFEST} is that of {manifest.name}")
    if missing := {f"{kind}.pt" for kind in KINDS} - files.keys():
        raise Damaged(path, f"{MANIFEST} lists the files {sorted(files)} without {sorted(missing)}")
    return manifest
