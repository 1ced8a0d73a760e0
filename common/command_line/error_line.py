"""A user error is one line: printed once per node and not once per rank.

Every rank of a job may meet the same error. Which one prints it? If all have met it together, the node's first rank. Otherwise
the first one that says so in the store of torchrun's agent, or without such a store, the node's first rank again. The others
wait a moment: torchrun ends all ranks when one has ended, and must not end the one that still closes its files. Torchrun's own
report of the failure follows below.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time

from common.errors import UsageError, one_line

# Seconds that a rank waits for its node's first rank to print the error. Its imports may take a while longer.
WAIT_FOR_LOCAL_RANK_ZERO_S = 4.0
WAIT_IF_PRINTED_S = 2.0
STORE_S = 2.0


def print_error(error: UsageError) -> None:
    """Print the error, if this rank is the one to do so; returns when this process may end."""
    message = one_line(str(error))
    local_rank = os.environ.get("LOCAL_RANK", "0")
    first = local_rank == "0" or not local_rank.isdecimal()
    claimed = None
    if not error.seen_by_all:  # or else the node's first rank does it, when it has closed what it had open
        claimed = _is_first_to_print(error.about or message)
        first = first if claimed is None else claimed
    if first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    elif error.seen_by_all or claimed is not None:
        time.sleep(WAIT_IF_PRINTED_S)
    else:
        time.sleep(WAIT_FOR_LOCAL_RANK_ZERO_S)  # torchrun or the scheduler ends this one, if the first has met it too
        print(f"error: [rank {os.environ.get('RANK')}] {message}", file=sys.stderr, flush=True)


def _is_first_to_print(about: str) -> bool | None:
    """Whether this rank is the first of its node with a message about this; None if there is no store to ask."""
    torch = sys.modules.get("torch")
    if torch is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{os.environ.get('GROUP_RANK')}"
    key = f"user-error/{start}/{hashlib.sha256(about.encode()).hexdigest()}"
    try:
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=STORE_S),
        )
        return bool(store.add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return None
