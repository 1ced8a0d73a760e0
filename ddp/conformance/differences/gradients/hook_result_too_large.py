"""A communication hook that returns more than the bucket

The hook below gathers the buckets of all ranks, and forgets to average them. torch takes the first elements as the
gradients: rank 0's on every rank, without a word. Why: `Reducer::populate_bucket_views_out` makes views of the result
without looking at its size.

With torch's: check in the hook that the result has as many elements as `bucket.buffer()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    def gather(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        everyone = [torch.empty_like(bucket.buffer()) for _ in range(2)]
        work = dist.all_gather(everyone, bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: torch.cat(everyone))

    network = line()
    model = DDP(network)
    model.register_comm_hook(None, lambda _, bucket: gather(bucket))
    model(x()).backward()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
