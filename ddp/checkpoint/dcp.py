"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), made of ours, and read into ours.

    python -m ddp.checkpoint export --format dcp --run-dir runs/sums-gpt --output for-dcp
    python -m ddp.checkpoint import --input from-dcp --run-dir runs/sums-gpt --output runs/imported

Any program with the same model reads the first, on any number of ranks, whatever shards it there::

    model_state, optimizer_state = torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": {"state": optimizer_state["state"]}}, checkpoint_id="for-dcp")

and writes the second by ``dcp.save`` with the same names: ``model.NAME`` and ``optimizer.state.NAME.exp_avg``. DCP has nothing of
a run but tensors, so all other facts come from the run's own checkpoint. DCP keeps an index of its files in a pickle,
``.metadata``, which may hold code: import only what you trust. (torch/distributed/checkpoint/filesystem.py.)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from common.errors import UsageError
from ddp.checkpoint import storage
from ddp.checkpoint.folder import Damaged, shard_keys
from ddp.checkpoint.shards import open_shards
from ddp.checkpoint.storage import KINDS

METADATA = ".metadata"


def write_dcp(path: Path, folder: Path) -> int:
    """Write the weights and the optimizer's state of a verified checkpoint into a new folder, in DCP's format.

    :returns: the number of tensors of the model
    :raises OSError: when it cannot be written
    """
    contents = {kind: storage.read(path, kind) for kind in KINDS}
    with _one_process():
        save(_by_name(path, contents), checkpoint_id=folder, no_dist=True)
    return len(contents["model"])


def read_dcp(folder: Path, path: Path) -> dict[str, Any]:
    """The contents of a verified checkpoint, with the tensors of a folder of DCP in the place of its own.

    :raises UsageError: when the folder lacks a tensor, or has it in another shape
    """
    if not (folder / METADATA).is_file():
        raise UsageError(
            f"--input {folder} holds no {METADATA}: name a folder that torch.distributed.checkpoint has written"
        )
    contents = {kind: storage.read(path, kind) for kind in KINDS}
    try:
        with _one_process():
            load(_by_name(path, contents), checkpoint_id=folder, no_dist=True)  # into the same memory
    except Exception as error:  # its type depends on what the files hold
        raise UsageError(f"--input {folder} does not fit {path.name}: {str(error).splitlines()[0]}") from error
    for rank in contents["ranks"]:
        rank["buffers"] |= {name: contents["model"][name] for name in rank["buffers"] if name in contents["model"]}
    return contents


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """A block in which DCP does not warn that there is one process, and raises that one's error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def _by_name(path: Path, contents: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint by the names that ``get_state_dict`` gives them; they are not copied."""
    names = open_shards(path).parameters if shard_keys(path) else _parameter_names(contents)
    numbers = [number for group in contents["optimizer"]["param_groups"] for number in group["params"]]
    if len(names) != len(numbers):
        raise Damaged(path, f"model.pt has {len(names)} parameters, optimizer.pt {len(numbers)}")
    state: dict[str, dict[str, Tensor]] = {
        names[number]: {key: value for key, value in kept.items() if value is not None}
        for number, kept in contents["optimizer"]["state"].items()
    }
    return {"model": contents["model"], "optimizer": {"state": state}}


def _parameter_names(contents: dict[str, Any]) -> list[str]:
    """The names of replicas' parameters, in the order in which the optimizer numbers them: that of ``named_parameters()``."""
    first: dict[int, str] = {}
    for name, value in contents["model"].items():
        first.setdefault(value.data_ptr(), name)  # one of several names of the same parameter
    return [name for name in first.values() if name not in contents["ranks"][0]["buffers"]]
