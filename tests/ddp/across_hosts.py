"""A job that trains once with every strategy, and tells the digest of the weights that each comes to.

torchrun ... -m tests.ddp.across_hosts FILE
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from common.files.atomic_files import write_json
from ddp.all_reduce import ALL_REDUCES, p2p
from tests.ddp.jobs import small, train_epochs

SETTINGS = {"train_samples": 720, "test_samples": 50, "lr": 0.01, "threads": 1}
STRATEGIES = {"torch": {}, "naive": {"strategy": "naive"}} | {
    name: {"strategy": "handwritten", "all_reduce": name} for name in ALL_REDUCES if name != "shared-memory"
}


def digests() -> dict[str, str]:
    """The SHA-256 of all parameters and buffers after five steps, by strategy."""
    digest_of = {}
    for name, settings in STRATEGIES.items():
        outcome = train_epochs(small(**SETTINGS, **settings))
        digest = hashlib.sha256()
        for key, value in sorted(outcome.parameters.items()):
            digest.update(key.encode() + value.tobytes())
        digest_of[name] = digest.hexdigest()
    return digest_of


def digests_as_if(ranks_per_host: int) -> dict[str, str]:
    """On one host, whose ranks take each other for those of several: by hosts, ``hierarchical`` adds in another order."""

    def host_id() -> str:
        return str(dist.get_rank() // ranks_per_host)

    with mock.patch.object(p2p, "host_id", host_id):
        return digests()


if __name__ == "__main__":
    everything = digests()
    if os.environ["RANK"] == "0":
        write_json(Path(sys.argv[1]), everything)
