"""Machines that are too small, and surroundings that are not there."""

from __future__ import annotations

from tests.adversary.attempt import Attempt, made_by
from tests.adversary.attempts.folders import folder
from tests.adversary.scenes import BEFORE_A_RUN, EVALUATE, RUN

AROUND = "tests.support.harm.disk"
LFW = "--dataset lfw --data-dir {faces} --min-images-per-person 2 --image-size 32"
ON_FILES = f"{RUN} {LFW} --train-samples 12 --test-samples 4 --batch-size 6"
LOAD = "dataloading.lfw_dataset --path-to-folder {faces} --batch-size 6 --get-timing --batches-to-check 2 --output {here}/out"
ANY = ("run/*", "out/*", "gone")
LONG = "{here}/" + 80 * "t"
OF_TRAINING = 500 * 2**20  # bytes that a run takes before its first batch

ATTEMPTS = [
    Attempt(
        f"{AROUND} small_shared_memory {ON_FILES} --loader stock --workers 2", r"/dev/shm", writes=BEFORE_A_RUN
    ),
    Attempt(f"{AROUND} small_shared_memory {LOAD} --num-workers 2", r"/dev/shm"),
    Attempt(f"{AROUND} small_shared_memory {ON_FILES} --loader fast --workers 2", r"", status=0, writes=ANY),
    Attempt(f"{AROUND} full_disk {RUN}", r"a checkpoint takes", writes=ANY),
    Attempt(f"{AROUND} read_only_disk {RUN}", r"Read-only file system", writes=ANY),
    Attempt(f"{AROUND} small_files {RUN}", r"File too large|cannot be written", writes=ANY),
    Attempt(f"{AROUND} few_files {LOAD} --num-workers 8", r"too many open files: .* raise the limit"),
    *(
        Attempt(
            f"{AROUND} few_files {ON_FILES} --loader {loader} --workers 8",
            r"too many open files: .* raise the limit",
            writes=ANY,
            most_bytes=OF_TRAINING,
        )
        for loader in ("stock", "fast")
    ),
    Attempt(f"{AROUND} no_folder {RUN}", r"", status=0, writes=ANY),
    Attempt(f"{AROUND} no_folder {RUN} --run-dir relative", r"relative"),
    Attempt(f"{AROUND} no_folder {EVALUATE}", r"", status=0),
    Attempt(f"{AROUND} no_temporary_folder {RUN}", r"", status=0, writes=ANY),
    Attempt(f"{LOAD} --num-workers 1", r"TMPDIR \S+ is too long", env={"TMPDIR": LONG}, scene=made_by(folder(LONG[7:]))),
    Attempt(RUN, r"", status=0, env={"OMP_NUM_THREADS": "many"}, writes=ANY),
    Attempt(RUN, r"", status=0, env={"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}, writes=ANY),
    Attempt(RUN, r"", status=0, env={"MPLCONFIGDIR": "/proc/nowhere"}, writes=ANY),
    Attempt(RUN, r"", status=0, env={"MPLBACKEND": "TkAgg", "DISPLAY": ""}, writes=ANY),
    Attempt(RUN, r"", status=0, env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, writes=ANY),
    Attempt(RUN, r"", status=0, env={"COLUMNS": "zero", "TERM": ""}, writes=ANY),
    Attempt(f"{RUN} --workers 5000", r"5000 loader workers take 62\.9 GB", writes=BEFORE_A_RUN),
    Attempt(f"{ON_FILES} --workers 5000", r"5000 loader workers take", writes=BEFORE_A_RUN),
    Attempt(f"{LOAD} --num-workers 5000", r"5000 loader workers take"),
    Attempt("dataloading.bench --path-to-folder {faces} --workers 5000,0", r"5000 loader workers take"),
]  # fmt: skip
