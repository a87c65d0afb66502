"""The kernels for GPUs, in Triton: the operations of `kernels.ops`, with the signatures of `kernels.reference`.

Importing this package needs Triton, so only `kernels.implementation` does it, after a look. Every function gives a row
the same bits whatever rows share the call. It knows no models and no requests.
"""

from kernels.triton.attention import attention
from kernels.triton.pointwise import add_rms_norm, copy_blocks, rms_norm, rope_and_cache, silu_mul
from kernels.triton.sampler import sample

__all__ = ["add_rms_norm", "attention", "copy_blocks", "rms_norm", "rope_and_cache", "sample", "silu_mul"]
