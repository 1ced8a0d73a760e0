"""Says whether a training script does distributed training right: any script, unchanged.

    python -m ddp.audit -- train.py --epochs 2               # on two ranks, with a stand-in for GPUs that are missing
    python -m ddp.audit --ranks 3 --json audit.json -- -m package.module
    python -m ddp.audit --explain same-order                 # what a finding is, and what to do

The script runs as torchrun starts it, or by itself if it starts its own processes. It is watched from within: what each rank computes,
sends, steps, reads and writes. What is wrong is printed, a line for each thing: where in the script, the numbers that prove
it, what to do, and the chapter that explains it. A run of some ten steps and two epochs, with a checkpoint if there are any, is enough.

A second run, on one rank with the batches of all, settles what one run can only suspect. The exit status is 1 if something is proven to
be wrong, 0 if nothing is, and 2 if the run could not be judged.
"""

from __future__ import annotations

import json
import sys

from common.command_line.cli import command, parse, split_arguments
from ddp.audit.audit import AuditConfig, audit
from ddp.audit.names import explain


@command
def main() -> None:
    own, script = split_arguments(sys.argv[1:], AuditConfig)
    config = parse(AuditConfig, "ddp.audit", __doc__, own)
    if config.explain:
        print(explain(config.explain))
        return
    report = audit(config, script, lambda line: print(line, flush=True))
    if config.json:
        config.json.write_text(json.dumps({"script": script, **report.as_json()}, indent=1) + "\n")
    wrong, ignored = report.wrong(), f", ignored: {len(report.ignored)}" if report.ignored else ""
    print(f"looked at: {report.looked_at}")
    print(f"wrong: {len(wrong)}{ignored}" if wrong or ignored else "nothing wrong was found")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
