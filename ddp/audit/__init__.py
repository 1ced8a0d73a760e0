"""The audit: runs somebody's training script, unchanged, and says what is wrong with how it trains on several ranks.

    python -m ddp.audit -- train.py --epochs 2
    ddp.audit.check("train.py", "--epochs", "2")   # in a test

ddp/audit/watch writes down what the script does, from within its processes. ddp/audit/detectors reads that, one kind of bug a file.
vary.py runs the same job again, first of all on one rank with the batches of all; compare.py says what differs, and settle.py which
suspicions that proves. libraries/ has jobs to try it on.
"""

from ddp.audit.audit import check as check
