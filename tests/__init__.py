"""The tests. They are a package, so that they can import each other's helpers."""

import os

# A step in fp16 takes seconds on processors with AVX512-FP16, where oneDNN has no fast backward pass of a convolution. With the
# instructions of older processors it takes a fifth of that. oneDNN reads this once, so it is set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
