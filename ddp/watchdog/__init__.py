"""A rank that hangs or is gone is named by all others (watchdog.py), by heartbeats in the job's store (failure_detector.py)."""
