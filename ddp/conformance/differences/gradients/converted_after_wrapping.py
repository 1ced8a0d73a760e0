"""`.double()` after wrapping

Nothing is averaged any more, in any step. `.half()` and `.bfloat16()` do the same. Why: the conversion gives each parameter
a new node that accumulates its gradient, and the hooks that `Reducer::Reducer` has set stay at the old ones. Issue #104336,
about a module that is moved to the CPU and back.

With torch's: convert and move the module first, then wrap it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network).double()
    model(x().double()).backward()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
