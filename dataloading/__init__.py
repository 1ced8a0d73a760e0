"""One process, many loader workers: from JPEG files to batches, and why loading is slow."""

from common.signals import early_signals as _early_signals  # Not found: another "common" comes first, rename it

_early_signals.handle_signals_of_a_command()
