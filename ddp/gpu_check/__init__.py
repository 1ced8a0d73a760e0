"""One command that tries on a GPU what a machine without one cannot prove, and keeps what it found: ``python -m ddp.gpu_check``.

checks.py       the list of checks: each is a command of this project, with a limit, and what a machine needs for it
runner.py       runs a check, and ends all that it has started
results.py      the numbers in the JSON that a check's command has written
summary.py      what passed, what is slow and why; summary.json and summary.txt
equivalence.py, gaps.py, pinned.py
                checks that no other command makes: the two DDPs give the same weights; the GPU's idle time behind each
                synchronization in a trace; copies from page-locked memory
"""
