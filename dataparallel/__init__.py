"""One process, many devices: ``nn.DataParallel``, its four steps, and why it often does not pay."""

from common.signals import early_signals as _early_signals  # Not found: another "common" comes first, rename it

_early_signals.handle_signals_of_a_command()
