"""The checks, by topic. Importing this package fills :data:`ddp.conformance.check.CHECKS`, in this order."""

# ruff: noqa: F401, I001
# fmt: off
from ddp.conformance.checks import (
    replicas, averages, forward, overlap, accumulation, hooks, errors, used_parameters,
    parameters, join, buffers, passes, copies, groups,
)
