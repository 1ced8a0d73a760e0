"""Where torch's DDP is wrong, or stricter than it must be

Each case is a program of a few lines. It runs on two ranks, with torch's DDP and then with ours
(`ddp.by_hand.DistributedDataParallel`), and prints what each comes to:

    torchrun --nproc_per_node=2 -m ddp.conformance.differences two_backwards

Rank 0's input is 1 and rank 1's is 3, and a network is `y = weight * x` with a weight of 1. So a gradient is 1 on rank 0 and 3 on
rank 1 where it is not averaged, and 2 on both where it is.

All outputs are of real runs: torch 2.15.0+cu132, two ranks, CPU, gloo. `torchrun --nproc_per_node=2 -m
ddp.conformance.differences` runs all cases and writes this page anew, and [a
test](../../../tests/ddp/conformance/test_differences.py) compares. A line without a rank is of both. `hangs` stands where a
rank waits for a message that never comes: gloo gives up after two seconds here, after half an hour in a job. An error is shown
up to the end of its first sentence.

Functions without `Reducer::` are those of `torch/nn/parallel/distributed.py` as in 2.15.0. Those of
`torch/csrc/distributed/c10d/reducer.cpp` were read in an older version; 2.15.0 was run. Issues and pull requests are those of
pytorch/pytorch; where none is named, we found none.

The other way round, ours refuses what torch's can do, each with an error that says so: `join` with sparse or delayed gradients
or with `skip_all_reduce_unused_params`, communication hooks with sparse gradients, `mixed_precision` with sparse gradients or with
checkpoints, reentrant checkpoints below an output that is not found, `lazy_bucket_allocation`,
`require_manual_backward_finalization`, parameters that are DTensors, and compiled autograd.

torch's has public names that ours has not, all of them parts of how it works: `gather`, `scatter` and `to_kwargs`, which it never
calls, `logger`, `modules_buffers`, `named_module_buffers`, `broadcast_bucket_size`, `bucket_bytes_cap`, `bucket_bytes_cap_default`,
`bucket_bytes_cap_list`, `parameters_to_ignore`, `device_type`, `is_multi_device_module`, `use_side_stream_for_tensor_copies`,
`will_sync_module_buffers`, and the arguments `dim` and `batched_grad_copy`, which change nothing. Ours also lacks
`_register_builtin_comm_hook`, whose two hooks `register_comm_hook` takes from `default_hooks`. It does not look at a hook's annotations.
Of `_get_ddp_logging_data` ours has no times and no latest error, and it names types as Python does (`float32`). Its
`has_rebuilt_buckets` is 1 with `find_unused_parameters` as well, since ours groups the buckets anew then too. A gradient that reaches a
parameter with no forward pass of the wrapper before is not averaged by either; ours says so, once. Ours averages nothing silently
after parameters are unfrozen: it raises an error. And `broadcast_buffers` is not deprecated.
"""
