"""One process, many devices: ``nn.DataParallel``, its four steps, and why it often does not pay."""

from common.signals import handle_signals_of_a_command  # Not found: another "common" comes first, rename it

handle_signals_of_a_command()
