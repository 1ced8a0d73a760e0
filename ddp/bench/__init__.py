"""Benchmarks of the trainer, the DDPs by hand, the all-reduces and the shards."""
