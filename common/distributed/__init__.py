"""The ranks of a job: process group, logging, store, worker groups."""

DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
