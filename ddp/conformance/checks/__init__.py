"""The checks of a wrapper, by topic.

Importing this package fills :data:`ddp.conformance.check.CHECKS`, in this order: the first is what all others build on."""

# ruff: noqa: F401, I001
# fmt: off
from ddp.conformance.checks import (
    averages, replicas, forward, overlap, accumulation, hooks, errors, used_parameters,
    parameters, join, buffers, passes, copies, groups,
)
