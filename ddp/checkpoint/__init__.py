"""Checkpoints that are complete or absent, checked to the last byte, and resumed bit for bit.

For a training loop of one's own, with any state::

    from ddp.checkpoint import prune, resume, save

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(resume("checkpoints", parts), steps):  # from 0 at the first start; damaged ones are passed over
        ...
        if rank == 0:
            save("checkpoints", step + 1, {name: part.state_dict() for name, part in parts.items()}, facts={"seed": seed})
            prune("checkpoints", keep_last=3)

``state`` is a dict of anything that ``torch.load(weights_only=True)`` reads: an EMA's weights, the state of a scaler or of
the random number generators are entries like any other. ``facts`` is JSON for people. :func:`clean`, once before the loop,
removes what a killed process left; :func:`verify` checks one checkpoint. Only one process may write: rank 0.

A model in shards (ddp/sharded) is saved by all ranks together: ``save_sharded`` and ``load_sharded`` in
``ddp.checkpoint.sharded_state``; examples/own_loop_sharded.py has a whole loop.

To copy it, take ddp/checkpoint/folder.py and directory.py, common/files/atomic_files.py and common/errors.py: they
import nothing else of this project. From the ground up:

- folder.py: one checkpoint, a folder whose every byte can be checked
- directory.py: the checkpoints of a run: each is complete or absent, and the newest that is whole is taken
- own_loop.py: all ranks of a loop of one's own begin where rank 0's newest ends
- shards.py: its tensors, cut into shards, for any number of ranks
- sharded_state.py: what each rank of a sharded model writes and reads
- storage.py, state.py, checkpointer.py: the trainer's: names and manifest; the state of a job; when it is saved
- ``python -m ddp.checkpoint``: inspect and export
"""

from ddp.checkpoint.directory import clean, list_checkpoints, newest, prune, save
from ddp.checkpoint.folder import Checkpoint, Damaged, load, verify
from ddp.checkpoint.own_loop import resume

__all__ = ["Checkpoint", "Damaged", "clean", "list_checkpoints", "load", "newest", "prune", "resume", "save", "verify"]
