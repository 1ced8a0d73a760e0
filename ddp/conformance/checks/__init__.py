"""The checks, by topic. Importing this package fills :data:`ddp.conformance.check.CHECKS`, in this order."""

from ddp.conformance.checks import averages as averages
