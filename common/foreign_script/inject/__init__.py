"""A folder for PYTHONPATH; a package, too, so that it is installed."""
