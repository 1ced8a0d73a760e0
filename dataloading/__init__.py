"""One process, many loader workers: from JPEG files to batches, and why loading is slow."""
