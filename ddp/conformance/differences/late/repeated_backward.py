"""A backward pass that failed, and is called again

`retain_graph=True` keeps the graph, so a backward pass that a hook ended can be repeated without a forward pass. torch counts on
where it stopped: `b` was ready in the first pass, and becomes ready again. Why: only the next forward pass calls
`Reducer::prepare_for_backward`, which resets the counts.

With torch's: call the model again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import TwoLines, grad, main, shown, x


def case(DDP: Any) -> Iterator[str]:
    def fail(*_: Any) -> None:
        raise MemoryError("too little memory")

    network = TwoLines()
    model = DDP(network)
    loss = model(x().requires_grad_())
    hook = network.a.weight.register_hook(fail)
    try:
        loss.backward(retain_graph=True)
    except MemoryError as error:
        yield shown(error)
    hook.remove()
    network.zero_grad()
    loss.backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
