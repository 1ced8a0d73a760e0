"""A wrapper within a wrapper, with `gradient_as_bucket_view`

Both refuse it: torch in the first backward pass, and ours when it is wrapped. Why: as for two wrappers of one module.

With torch's: wrap the outer module alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ddp.conformance.differences.program import line, main, x


def case(DDP: Any) -> Iterator[str]:
    inner = nn.Sequential(DDP(line(), gradient_as_bucket_view=True))
    model = DDP(inner, gradient_as_bucket_view=True)
    yield "it is wrapped"
    model(x()).backward()


if __name__ == "__main__":
    main(case)
