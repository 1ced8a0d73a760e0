"""The rest of torch's DistributedDataParallel, layered around the lesson: change one import, and a program runs on ours.

    from ddp.by_hand import DistributedDataParallel

wrapper.py            torch's arguments and methods, in torch's order
reducer.py            buckets that no rank uses, and what runs when backward is over
sparse.py             sparse gradients of embeddings
delayed.py            parameters that are averaged when the gradient of another one is ready
join.py               ranks with different numbers of batches
hooks.py              communication hooks as torch takes them, and buffers that a function of the user synchronizes
mixed_precision.py    a forward and backward pass in a lower precision
in_backward.py        optimizers that step within backward
logging_data.py       numbers about settings and buckets
requirements.py       what is refused
"""
