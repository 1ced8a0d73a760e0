"""One process, many loader workers: from JPEG files to batches, and why loading is slow."""

from common.signals import handle_signals_of_a_command  # Not found: another "common" comes first, rename it

handle_signals_of_a_command()
