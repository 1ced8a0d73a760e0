"""Stop signals at moments that a log line marks. (test_signals.py sends them at random moments.)"""

from __future__ import annotations

import signal

from tests.adversary.attempt import Attempt
from tests.adversary.scenes import RESUME, RUN

LONG = RUN.replace("--epochs 1", "--epochs 200")  # is not over when the signal comes
FIRST, STEPS = r"fashion-cnn on glyphs", r"epoch 2 of 200"
ANY = ("run/*", "out/*", "bench/*")
TERM, INT, HUP, USR1, USR2 = (getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2"))

ATTEMPTS = [
    *(
        Attempt(LONG, r"checkpoint|stop", status=75, at=at, signals=(number,), writes=ANY)
        for at in (FIRST, STEPS)
        for number in (TERM, HUP, USR1)
    ),
    *(Attempt(LONG, r"", status=130, at=at, signals=(INT,), writes=ANY) for at in (FIRST, STEPS)),
    *(
        Attempt(f"{LONG} {flags}", r"", status=75, at=STEPS, signals=(TERM,), writes=ANY)
        for flags in ("--async-checkpoint", "--checkpoint-every 1", "--workers 1", "--strategy handwritten", "--precision fp16")
    ),
    *(
        Attempt(LONG, r"", status=75, at=STEPS, signals=(TERM,), ranks=ranks, writes=ANY)
        for ranks in (("", ""), ("--strategy handwritten",) * 2)
    ),
    Attempt(LONG, r"", status=130, at=STEPS, signals=(INT,), ranks=("", ""), writes=ANY),
    Attempt(RESUME.replace("--epochs 2", "--epochs 200"), r"", status=75, at=r"epoch 3 of 200", signals=(TERM,), writes=ANY),
    # The other commands: nothing to save, so they end as Ctrl-C ends a command, without a traceback.
    *(
        Attempt(command, r"", status=130, at=at, signals=(INT,), writes=ANY)
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
