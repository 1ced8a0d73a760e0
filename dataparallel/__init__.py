"""One process, many devices: ``nn.DataParallel``, its four steps, and why it often does not pay."""
