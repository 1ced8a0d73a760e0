"""One process per device: DistributedDataParallel and everything around it that a real job needs."""

from common.signals import early_signals as _early_signals  # Not found: another "common" comes first, rename it

_early_signals.handle_signals_of_a_command(requeued="ddp.train")
