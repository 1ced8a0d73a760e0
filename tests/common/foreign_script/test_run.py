"""A script's processes, which do not outlive its run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from common.child_processes import descendants
from common.foreign_script.run import run


def test_a_run_that_is_stopped_leaves_neither_a_process_nor_a_warning(tmp_path: Path) -> None:
    """pytest makes an error of a warning that the process still runs."""
    before = descendants()
    outcome = run(["-c", "import time; time.sleep(600)"], os.environ, 600, tmp_path, None, is_over=lambda: True)
    assert outcome.status is None and descendants() == before
    gc.collect()
