"""`delay_all_reduce_named_params` with all parameters that are trained

The first forward pass fails. (Without a frozen parameter, already the constructor does: it then finds no device.) Why:
`__init__` returns early (`_delay_all_reduce_all_params`), before it sets `_lazy_init_ran`, which `_pre_forward` asks for.

With torch's: leave out one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import TwoLines, grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network, first = TwoLines(), line()
    network.b.weight.requires_grad_(False)
    model = DDP(
        network,
        delay_all_reduce_named_params=[("a.weight", network.a.weight)],
        param_to_hook_all_reduce=first.weight,
    )
    model(first(x())).backward()
    yield f"gradient: {grad(network.a.weight)}"


if __name__ == "__main__":
    main(case)
