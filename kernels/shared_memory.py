"""All-gather between the ranks of one host through shared memory: what a CPU group exchanges a hundred times a step.

The memory is a file without a name once every rank has it open, so nothing stays behind. Made by
`workers.tensor_parallel`; needs the C++ operators.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.implementation import cpu_kernels

SLOT_BYTES = 64
BUFFER_BYTES = 16 * 2**20
"""One of the two buffers; larger gathers go in several."""


class SharedMemory:
    """One rank's view. Every rank of `size` opens the same file; a rank silent for `timeout_s` raises RuntimeError."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float) -> None:
        self._operators = cpu_kernels(torch.device("cpu"))
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), size * SLOT_BYTES + 2 * BUFFER_BYTES)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._rank = rank
        self._timeout_s = timeout_s
        self._sequence = 0
        self._operators.shared_join(self._memory, rank)

    @staticmethod
    def create(size: int) -> Path:
        """Make the file for `size` ranks. The maker unlinks it when all ranks have opened it."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="choral-", dir=folder)
        os.truncate(handle, size * SLOT_BYTES + 2 * BUFFER_BYTES)
        os.close(handle)
        return Path(name)

    def all_gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Every rank's [T, widths[rank]] side by side: [T, sum(widths)]."""
        rows = max(1, BUFFER_BYTES // (sum(widths) * x.element_size()))
        parts = [self._gather(part, widths) for part in torch.split(x.contiguous(), rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def exchange_rows(self, x: Tensor, widths: Sequence[int], span: slice) -> Tensor:
        """Rows `span` of what `all_gather_columns` makes of `x`; valid until the next call, which other ranks wait for.

        Other ranks may want other rows.
        """
        if not self.fits(len(x), sum(widths), x.dtype):
            return self.all_gather_columns(x, widths)[span]
        self._sequence += 1
        begin = self._operators.shared_put(
            self._memory, x.contiguous(), widths, self._rank, self._sequence, self._timeout_s
        )
        size = len(x) * sum(widths) * x.element_size()
        return self._memory[begin : begin + size].view(x.dtype).view(len(x), -1)[span]

    def fits(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether [rows, width] go in one gather."""
        return rows * width * dtype.itemsize <= BUFFER_BYTES

    def reserve(self, gathers: int) -> tuple[Tensor, int, int, float]:
        """For an operator that gathers by itself: (memory, rank, first sequence number, timeout)."""
        first = self._sequence + 1
        self._sequence += gathers
        return self._memory, self._rank, first, self._timeout_s

    def _gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self._sequence += 1
        out: Tensor = self._operators.shared_gather(
            self._memory, x, widths, self._rank, self._sequence, self._timeout_s
        )
        return out
