"""The ranks of a job: process group, logging, store, worker groups."""

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
STORE_POLL_S = 0.01  # between two looks into the job's store
