"""A buffer that is registered after wrapping

It is never sent if the module had no buffer when it was wrapped, and before each forward pass if it had any. Why:
`will_sync_module_buffers` looks at `len(self.modules_buffers)`, which is renewed only where buffers are sent
(`_sync_buffers`).

With torch's: register buffers first, then wrap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp.conformance.differences.program import line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    network.register_buffer("number", torch.tensor(float(dist.get_rank())))
    model(x())
    yield f"number: {network.get_buffer('number').item():g}"


if __name__ == "__main__":
    main(case)
