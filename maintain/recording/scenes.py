"""The recordings, as data: a script, the variants that are shown one below the other, and which part of the run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]


class Scene(NamedTuple):
    """A recording.

    :ivar text: what to look for
    :ivar script: run by each rank; relative to the repository
    :ivar variants: a title for each run, and its arguments
    :ivar sources: more files whose lines are followed
    :ivar calls: more functions that are recorded, as ``module.name`` or ``module.class.name``
    :ivar window: see :func:`maintain.recording.events.read`
    :ivar hosts: whether each rank has an agent of torchrun, as on a host of its own, which starts it again
    """

    title: str
    text: str
    script: str
    variants: dict[str, tuple[str, ...]]
    ranks: int = 2
    sources: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    window: tuple[str, int, str, int] = ("", 1, "", 1)
    hosts: bool = False

    @property
    def files(self) -> list[Path]:
        """The script, and the other files whose lines are followed."""
        return [REPOSITORY / path for path in (self.script, *self.sources)]


_ALL_REDUCES = {
    "ring": "Each rank sends a chunk to the next rank and adds what comes from the one before. After three messages each rank has "
    "the sum of one chunk, and after three more it has all sums. All links are busy at all times.",
    "halving-doubling": "Partners exchange halves, then quarters, and add. Then the sums come back in the opposite order: as few bytes as "
    "a ring sends, in four messages instead of six.",
    "tree": "Sums go up a binomial tree to rank 0 and come down again. The whole tensor travels in each message, and most links are idle.",
    "naive": "Rank 0 collects all tensors, adds, and sends the sum to all. The others wait for rank 0.",
}


def _all_reduce(name: str, text: str, *calls: str) -> Scene:
    source = name.replace("-", "_")
    kind = name.title().replace("-", "")
    return Scene(
        f"All-reduce: {name}",
        text,
        "examples/recordings/all_reduce.py",
        {"": (name,)},
        ranks=4,
        sources=(f"ddp/all_reduce/{source}.py",),
        calls=(f"ddp.all_reduce.{source}.{kind}.run", *calls),
        window=("all-reduce", 2, "all-reduce", 2),
    )


_SHARED = (
    "ddp.all_reduce.local_sockets.LocalSockets.meet",
    "ddp.all_reduce.shared_memory.SharedMemory._sum_part",
)
_ZERO = {
    1: "Each rank has all weights, and the optimizer's state of half of them. Gradients are reduced, each rank steps with its half, and "
    "the new weights are gathered.",
    2: "The gradients are divided, too: a reduce-scatter leaves each rank only the part that its optimizer needs.",
    3: "The weights are divided, too. They are gathered unit by unit before they are used, in the forward pass and again in the "
    "backward pass, and freed at once.",
}

SCENES = {
    "rendezvous": Scene(
        "A process group comes up",
        "Rank 1 starts late. There is no torchrun here, so rank 0 serves the store, a table of keys and values that all ranks reach. It "
        "waits for the key of rank 1, and then inside init_process_group for rank 1 itself. Only then can a collective run.",
        "examples/recordings/rendezvous.py",
        {"": ()},
    ),
    "epochs": Scene(
        "Who gets which samples",
        "Look at the sample numbers of each load. In an epoch, no two ranks take the same sample. The order of the second epoch is another "
        "one, because the sampler was told the epoch. Below, it was not told: both epochs take the same samples in the same order.",
        "examples/recordings/epochs.py",
        {"sampler.set_epoch(epoch)": (), "without it": ("--broken",)},
        window=("set_epoch", 1, "optimizer step", 4),
    ),
    "overlap": Scene(
        "Hooks, buckets, and overlap with the backward pass",
        "Each gradient that is ready calls a hook. When all gradients of a bucket are ready, its all-reduce starts, while the backward pass "
        "goes on. At the end, the rank waits for the rest. Below, the forward pass goes around the wrapper: nothing is sent, "
        "and the two ranks' weights drift apart. Compare the weights after the optimizer's step.",
        "examples/recordings/overlap.py",
        {"model(inputs)": (), "model.module(inputs)": ("--broken",)},
        sources=("ddp/by_hand/reducer.py", "ddp/by_hand/wrapper.py"),
        window=("forward", 3, "optimizer step", 3),
    ),
    "no-sync": Scene(
        "no_sync over four micro-steps",
        "Under no_sync the hooks do nothing, and the gradients add up. Only the last micro-step sends. Below, no_sync covers the backward "
        "pass alone. DDP decides in the forward pass, so each of the four micro-steps sends all gradients.",
        "examples/recordings/no_sync.py",
        {"around forward and backward": (), "around backward only": ("--broken",)},
        window=("forward", 5, "optimizer step", 2),
    ),
    "scaler": Scene(
        "GradScaler meets an inf",
        "In the second step an input of rank 1 is so large that its gradient overflows. The all-reduce carries the inf to rank 0. Both "
        "ranks find it, skip the optimizer's step, and halve their scales. Below, gradients are clipped before they are unscaled. The norm "
        "is that of scaled gradients, so the clipped gradients nearly vanish.",
        "examples/recordings/scaler.py",
        {"unscale, then clip": (), "clip, then unscale": ("--broken",)},
        window=("forward", 1, "scaler.update", 3),
    ),
    **{f"all-reduce-{name}": _all_reduce(name, text) for name, text in _ALL_REDUCES.items()},
    "all-reduce-shared-memory": _all_reduce(
        "shared-memory",
        "No bytes are sent. All ranks meet, each adds up its quarter of all buffers and writes the sum to all of them, and they meet again.",
        *_SHARED,
    ),
    "all-reduce-hierarchical": _all_reduce(
        "hierarchical",
        "Ranks 0 and 1 play one host, ranks 2 and 3 another. The ranks of a host add up in shared memory. Then the ranks with the same "
        "part sum it over the hosts, in a ring.",
        *_SHARED,
    ),
    **{
        f"zero{stage}": Scene(
            f"ZeRO, stage {stage}",
            text,
            "examples/recordings/zero.py",
            {"": (str(stage),)},
            sources=(f"ddp/sharded/zero{stage}.py",),
            window=("forward", 2, "optimizer step", 2),
        )
        for stage, text in _ZERO.items()
    },
    "data-parallel": Scene(
        "DataParallel's four steps",
        "One process, and a thread for each device. The batch is scattered, the module is copied, the copies run at once, and their outputs "
        "are gathered. In each step, all of it happens again.",
        "examples/recordings/data_parallel.py",
        {"": ()},
        ranks=1,
        sources=("dataparallel/parallel.py",),
        calls=tuple(f"dataparallel.parallel.{name}" for name in ("scatter", "replicate", "_call", "gather")),
        window=("forward", 3, "optimizer step", 3),
    ),
    "loader": Scene(
        "A loader's workers, in order and not",
        "Two workers load whole batches. One file of the third batch is slow. In order, the batches behind it wait, though they are ready. "
        "With in_order=False, they are handed out first.",
        "examples/recordings/loader.py",
        {"in order": (), "in_order=False": ("--any-order",)},
        ranks=1,
        window=("next batch", 1, "", 1),
    ),
    "checkpoint": Scene(
        "A checkpoint: complete or absent",
        "The files are written beside their place and synced. Then the folder is renamed, and the folder above is synced. Below, "
        "the process is killed before the rename. What it leaves is not a checkpoint, and the newest one is still whole.",
        "examples/recordings/checkpoint.py",
        {"saved twice": (), "killed in the second save": ("--kill",)},
        ranks=1,
        sources=("ddp/checkpoint/folder.py",),
        window=("forward", 1, "", 1),
    ),
    "restart": Scene(
        "Two hosts, a death, a restart",
        "Each host has an agent of torchrun and one rank. In the third step rank 1 is killed. Rank 0 waits in its all-reduce and fails. "
        "The agents notice, meet again, and start both ranks anew, which go on from the checkpoint. "
        "Most of the time passes while Python and torch start again.",
        "examples/recordings/restart.py",
        {"": ()},
        window=("init_process_group", 1, "", 1),
        hosts=True,
    ),
}
