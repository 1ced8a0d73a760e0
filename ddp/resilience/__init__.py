"""Keeps a job of ddp.train alive, and lets it go on: bad steps, stop requests, checkpoints, restarts.

resume.py         whose directory the run is, where it continues, and with which settings
guard.py          three calls around a step: a bad step does no harm (device_guard.py: without waiting for a GPU)
supervisor.py     logs, checkpoints, stop requests, and the end of an epoch
"""

from __future__ import annotations

from ddp.checkpoint.storage import RunCheckpoint
from ddp.resilience.resume import complete_settings, open_run
from ddp.resilience.supervisor import Supervisor, build_guard, supervise

__all__ = ["RunCheckpoint", "Supervisor", "build_guard", "complete_settings", "open_run", "supervise"]
