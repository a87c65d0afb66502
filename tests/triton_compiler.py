"""Compiles the Triton kernels for a Hopper GPU on a machine that has none; run as a program, prints one line each.

A driver that only names the target stands in for the real one, and every launch stops after compiling. Must run in a
process of its own, because others interpret the kernels.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may use on the target."""


class NoDevice:
    """What the compiler asks a driver for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stop_after_compiling() -> None:
    from triton.runtime import driver, jit

    driver.set_active(NoDevice())
    launch = jit.JITFunction.run

    @functools.wraps(launch)
    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        compiled = launch(self, *args, **{**options, "warmup": True})
        assert compiled.metadata.shared <= SHARED_MEMORY, (self.__name__, compiled.metadata.shared)
        matrix = "wgmma" if "wgmma" in compiled.asm["ptx"] else "mma" if "mma.sync" in compiled.asm["ptx"] else "-"
        print(self.__name__, compiled.metadata.num_warps, compiled.metadata.shared, matrix, flush=True)
        return compiled

    jit.JITFunction.run = compile_only


def main() -> None:
    stop_after_compiling()
    from kernels import triton as kernels
    from tests.kernels.test_sampler import batch
    from tests.paged import Bench, Shape

    for shape in (Shape(9, 3, 64, 32, torch.bfloat16), Shape(32, 8, 128, 16, torch.bfloat16)):
        bench = Bench(kernels, shape)
        bench.run([(1, 200, list(range(20)))])
        step = bench.batch([(1, 200, list(range(20)))])
        q, k, v = torch.zeros(1, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=shape.dtype).split(
            [shape.heads, shape.kv_heads, shape.kv_heads], 1
        )
        kernels.rope_and_cache(q, k, v, torch.zeros(256, shape.dim), step, bench.kv, 0)
        kernels.copy_blocks(bench.kv, torch.zeros(1, 2, dtype=torch.int64))
    x = torch.zeros(4, 576, dtype=torch.bfloat16)
    kernels.add_rms_norm(x, x, x[0], 1e-5)
    kernels.silu_mul(x)
    kernels.sample(torch.zeros(4, 49152, dtype=torch.bfloat16), batch(4, num_logprobs=2))


if __name__ == "__main__":
    main()
