"""The checks, by topic. Importing this package fills :data:`ddp.conformance.check.CHECKS`, in this order."""

# ruff: noqa: I001
from ddp.conformance.checks import replicas as replicas
from ddp.conformance.checks import averages as averages
from ddp.conformance.checks import forward as forward
from ddp.conformance.checks import overlap as overlap
from ddp.conformance.checks import accumulation as accumulation
from ddp.conformance.checks import hooks as hooks
from ddp.conformance.checks import errors as errors
from ddp.conformance.checks import unused as unused
from ddp.conformance.checks import parameters as parameters
from ddp.conformance.checks import static_graph as static_graph
from ddp.conformance.checks import join as join
from ddp.conformance.checks import buffers as buffers
from ddp.conformance.checks import passes as passes
from ddp.conformance.checks import copies as copies
from ddp.conformance.checks import groups as groups
from ddp.conformance.checks import precision as precision
