"""Two wrappers of one module in one backward pass, with `gradient_as_bucket_view`

Without the option, torch's come to the same 4. Why: each wrapper's reducer makes `.grad` a view into its own bucket, and
`Reducer::finalize_bucket_dense` refuses the view of the other.

With torch's: `gradient_as_bucket_view=False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    one, other = (DDP(network, gradient_as_bucket_view=True) for _ in range(2))
    (one(x()) + other(x())).backward()
    yield f"the sum of both: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
