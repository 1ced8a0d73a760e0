"""Stop signals at moments that a log line marks. (test_signals.py sends them at random moments.)"""

from __future__ import annotations

import signal

from tests.adversary.attempt import Attempt
from tests.adversary.scenes import RESUME, RUN

LONG = RUN.replace("--epochs 1", "--epochs 200")  # is not over when the signal comes
FIRST, STEPS = r"fashion-cnn on glyphs", r"epoch 2 of 200"
STOPPED, SAVED = r"stopped by SIG[A-Z0-9]+", r"stopped by SIG[A-Z0-9]+ on rank 0.* after step \d+, which is saved"
BEFORE_AND_AFTER = ((FIRST, STOPPED), (STEPS, SAVED))  # the first step, perhaps; a step, for certain
ANY = ("run/*", "out/*", "bench/*")
TERM, INT, HUP, USR1 = (getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1"))

ATTEMPTS = [
    *(
        Attempt(LONG, line, status=75, at=at, signals=(number,), writes=ANY)
        for at, line in BEFORE_AND_AFTER
        for number in (TERM, HUP, USR1)
    ),
    *(Attempt(LONG, line, status=130, at=at, signals=(INT,), writes=ANY) for at, line in BEFORE_AND_AFTER),
    *(
        Attempt(f"{LONG} {flags}", SAVED, status=75, at=STEPS, signals=(TERM,), writes=ANY)
        for flags in ("--async-checkpoint", "--checkpoint-every 1", "--workers 1", "--strategy handwritten", "--precision fp16")
    ),
    *(
        Attempt(LONG, SAVED, status=75, at=STEPS, signals=(TERM,), ranks=ranks, writes=ANY)
        for ranks in (("", ""), ("--strategy handwritten",) * 2)
    ),
    Attempt(LONG, SAVED, status=130, at=STEPS, signals=(INT,), ranks=("", ""), writes=ANY),
    Attempt(RESUME.replace("--epochs 2", "--epochs 200"), SAVED, status=75, at=r"epoch 3 of 200", signals=(TERM,), writes=ANY),
    # The other commands: nothing to save, so they end as Ctrl-C ends a command, without a traceback.
    *(
        Attempt(command, r"stopped by SIGINT", status=130, at=at, signals=(INT,), writes=ANY)
        for command, at in (
            ("dataparallel.train --devices cpu,cpu --train-samples 144 --test-samples 16 --epochs 200 --run-dir {here}/run", "epoch 2"),
            ("dataloading.bench --path-to-folder {faces} --workers 0,2 --repeats 100 --output {here}/bench", "step"),
            ("dataloading.bench --path-to-folder {faces} --workers 2 --loader fast --repeats 100 --output {here}/bench", "step"),
            ("ddp.bench overhead --rounds 500", "(?s)."),
            ("ddp.bench allreduce --output {here}/bench", "(?s)."),
            ("dataparallel.bench --output {here}/bench", "(?s)."),
        )
    ),
]  # fmt: skip
