"""One process per device: DistributedDataParallel and everything around it that a real job needs."""
