"""A copy of a wrapper

After one step, `copy.deepcopy` (or `torch.save` and `torch.load`) of the wrapper gives one that never averages. Why:
`__setstate__` makes a new reducer, which waits for the first backward pass to average it as a whole, but
`_static_graph_delay_allreduce_enqueued` is copied as True: `_DDPSink` is not put in.

With torch's: copy the module, and wrap the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    model = DDP(line(), static_graph=True)
    model(x()).backward()
    yield f"the original: {grad(model.module.weight)}"
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(x()).backward()
    yield f"its copy: {grad(copied.module.weight)}"


if __name__ == "__main__":
    main(case)
