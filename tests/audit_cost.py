"""The time of an audit: a job alone, on stand-in GPUs, and audited in each way, in turn. A command, since it wants idle cores.

    python -m tests.audit_cost -m ddp.train --epochs 4 --train-samples 11520 --test-samples 500
    python -m tests.audit_cost train.py --batch-size 8       # in the script's folder

A script that needs GPUs does not run alone on CPUs: its times are compared with those on stand-in GPUs.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time

from common.benchmarking.timing import interleave, paired_ratio

ROUNDS = 3
AUDIT = (sys.executable, "-m", "ddp.audit")
WAYS = {
    "alone, on CPUs": (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
    "audited once, on CPUs": (*AUDIT, "--once", "--device", "cpu", "--"),
    "audited once, --quick, on CPUs": (*AUDIT, "--once", "--quick", "--device", "cpu", "--"),
    "whole audit, on CPUs": (*AUDIT, "--device", "cpu", "--"),
    "alone, on stand-in GPUs": (sys.executable, "-m", "ddp.audit.gpu", "--"),
    "audited once, on stand-in GPUs": (*AUDIT, "--once", "--"),
    "audited once, --quick, on stand-in GPUs": (*AUDIT, "--once", "--quick", "--"),
    "whole audit, on stand-in GPUs": (*AUDIT, "--"),
}


def seconds(command: tuple[str, ...]) -> float:
    """How long a command takes; one that fails ends the whole."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in ((0, 1) if "ddp.audit" in command else (0,)):
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - begun


def main() -> None:
    script = sys.argv[1:]
    on_cpus = subprocess.run([*WAYS["alone, on CPUs"], *script], capture_output=True).returncode == 0
    ways = {name: (*way, *script) for name, way in WAYS.items() if on_cpus or name.endswith("GPUs")}
    times = interleave({name: functools.partial(seconds, way) for name, way in ways.items()}, ROUNDS, warmup=0)
    reference = next(iter(times.values()))
    for name, own in times.items():
        print(f"{name:42}{statistics.median(own):7.1f} s  {paired_ratio(own, reference):.2f} times as long")


if __name__ == "__main__":
    main()
