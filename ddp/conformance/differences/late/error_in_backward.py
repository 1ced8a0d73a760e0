"""An error in the middle of backward

A hook raises once, as one does where memory is short. All ranks catch it, and skip the step. torch then refuses every later
step by an assertion of its own. Why: autograd does not call `Reducer::finalize_backward`, so `require_finalize_` stays True.
An error in a communication hook has the same effect.

With torch's: make a new wrapper.
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
    hook = network.a.register_full_backward_hook(fail)
    try:
        model(x().requires_grad_()).backward()
    except MemoryError as error:
        yield shown(error)
    hook.remove()
    network.zero_grad()
    model(x()).backward()
    yield f"the next step: {grad(network.a.weight)}"


if __name__ == "__main__":
    main(case)
