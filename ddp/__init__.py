"""One process per device: DistributedDataParallel and everything around it that a real job needs."""

from common.signals import handle_signals_of_a_command  # Not found: another "common" comes first, rename it

handle_signals_of_a_command(requeued="ddp.train")
