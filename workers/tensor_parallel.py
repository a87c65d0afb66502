"""Who holds what in a tensor-parallel group, and how its ranks exchange activations.

`ShardPlan` is arithmetic on a model's sizes: KV heads may be dealt out unevenly, and the columns of the
feed-forward network the other way round. `Communicator` wraps a process group. Neither knows layers or
weights; `layers` and `dealt_draws` use the collectives.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn import functional

from kernels.implementation import cpu_kernels
from kernels.shared_memory import SharedMemory
from workers.model_config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Split:
    """A row of things cut into one run per rank: rank r holds `sizes[r]` of them, in rank order."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def of(self, rank: int) -> slice:
        """What `rank` holds of the whole row."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    def scaled(self, width: int) -> "Split":
        """The same cut of a row in which each thing is `width` wide."""
        return Split(tuple(size * width for size in self.sizes))

    @classmethod
    def even(cls, total: int, size: int) -> Self:
        """`total` things dealt out evenly; the last ranks may be left empty."""
        return cls(tuple(total // size + (rank < total % size) for rank in range(size)))

    @classmethod
    def deal(cls, total: int, shares: Sequence[float], unit: int) -> Self:
        """Cut `total` near to the positive `shares`, at multiples of `unit`, nobody left empty.

        Raises ValueError when there are fewer units than shares.
        """
        blocks = -(-total // unit)
        if blocks < len(shares):
            raise ValueError(f"{total} in units of {unit} cannot be dealt to {len(shares)} ranks")
        ideal = [blocks * share / sum(shares) for share in shares]
        counts = [max(1, int(part)) for part in ideal]
        while sum(counts) != blocks:
            step = 1 if sum(counts) < blocks else -1
            open_ranks = [rank for rank, count in enumerate(counts) if count + step >= 1]
            counts[max(open_ranks, key=lambda rank: (step * (ideal[rank] - counts[rank]), rank))] += step
        sizes = [count * unit for count in counts]
        sizes[-1] -= blocks * unit - total
        return cls(tuple(sizes))


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How a model lies on the ranks of a group.

    `exact`: every linear is cut by output columns and activations are gathered, so a sum is never split and
    the bits are those of one rank. Otherwise the second linear of each pair is cut by input and its outputs
    are summed.
    """

    exact: bool
    kv_heads: Split
    ffn: Split
    """Columns of the feed-forward middle."""
    hidden: Split
    """Output columns of the attention and feed-forward outputs; only used when exact."""
    vocab: Split
    """Rows of the embedding and of the output projection, cut at multiples of `vocab_block`."""

    @property
    def size(self) -> int:
        return len(self.kv_heads.sizes)

    @classmethod
    def build(cls, config: ModelConfig, size: int, *, exact: bool) -> Self:
        """Raises ValueError naming the sizes that are possible."""
        block = vocab_block(config.vocab_size)
        limits = (config.num_kv_heads, config.intermediate_size, config.vocab_size // block)
        if not 1 <= size <= min(limits):
            raise ValueError(
                f"tp = {size} is not possible: the model has {config.num_kv_heads} KV heads, "
                f"so tp must be from 1 to {min(limits)}"
            )
        kv_heads = Split.even(config.num_kv_heads, size)
        even = [1.0] * size
        return cls(
            exact=exact,
            kv_heads=kv_heads,
            ffn=Split.deal(
                config.intermediate_size,
                _ffn_shares(config, kv_heads, exact),
                _unit(config.intermediate_size, size),
            ),
            hidden=Split.deal(config.hidden_size, even, _unit(config.hidden_size, size)),
            vocab=Split.deal(config.vocab_size, even, block),
        )


def vocab_block(vocab_size: int) -> int:
    """Tokens per block at whose borders a vocabulary may be cut; the same for every group size."""
    return max(block for block in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if block * 64 <= max(vocab_size, 64))


def _unit(total: int, size: int) -> int:
    """Columns are cut at multiples of 64 (whole vector registers), or of less in tiny models."""
    return max(unit for unit in (1, 2, 4, 8, 16, 32, 64) if unit == 1 or total // unit >= size)


def _ffn_shares(config: ModelConfig, kv_heads: Split, exact: bool) -> list[float]:
    """Feed-forward columns per rank so that heads and columns together weigh the same everywhere.

    Weights are counted, as they are what a step reads. Of what is cut with the heads or with the columns:
    q, k, v and o per KV head, gate, up and down per column; o and down are cut evenly when exact.
    """
    per_column = 2 if exact else 3
    per_head = (config.group_size + 2 if exact else 2 * config.group_size + 2) * config.head_dim
    whole = per_head * config.num_kv_heads + per_column * config.intermediate_size
    fair = whole / len(kv_heads.sizes)
    return [max(fair - per_head * heads, 1.0) / per_column for heads in kv_heads.sizes]


class Communicator:
    """Collectives of one rank over an initialised process group; without a group, the only rank of its own.

    Every rank must make the same calls in the same order. A rank lost or silent raises RuntimeError after the
    timeout of the group. With `shared`, memory the ranks of one host share, CPU tensors go through that.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, shared: SharedMemory | None = None) -> None:
        self.group, self.shared = group, shared
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x` [T, H], the same bits on every rank. May overwrite `x`."""
        if self.shared is not None:
            parts = self.shared.all_gather_columns(x, [x.shape[1]] * self.size).view(len(x), self.size, -1)
            # In rank order and rounded once, so that a row's sum does not depend on the rows beside it.
            total = parts[:, 0].float()
            for rank in range(1, self.size):
                total += parts[:, rank]
            return total.to(x.dtype)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's [T, widths[rank]] side by side: [T, sum(widths)]."""
        if self.group is None:
            return x
        if self.shared is not None:
            return self.shared.all_gather_columns(x, widths)
        # Gathers of unequal sizes are not offered by every backend: all send the widest.
        widest = max(widths)
        padded = functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def exchange_rows(self, x: torch.Tensor, spans: Sequence[slice], widths: Sequence[int]) -> torch.Tensor:
        """Of every rank's columns [T, widths[rank]] the whole rows spans[own rank]: [its length, sum(widths)].

        Rows may be wanted by several ranks, or by none. The result is valid until the next collective.
        """
        if self.group is None:
            return x[spans[0]]
        if self.shared is not None:
            return self.shared.exchange_rows(x, widths, spans[self.rank])
        mine, own = spans[self.rank], x.shape[1]
        count = mine.stop - mine.start
        out = x.new_empty(count * sum(widths))
        sent = torch.cat([x[span].reshape(-1) for span in spans])
        dist.all_to_all_single(
            out,
            sent,
            output_split_sizes=[count * width for width in widths],
            input_split_sizes=[(span.stop - span.start) * own for span in spans],
            group=self.group,
        )
        parts = torch.split(out, [count * width for width in widths])
        return torch.cat([part.view(count, width) for part, width in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        """Leave the group. The ranks need not do so together."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = self.shared = None


def open_store(host: str, port: int, *, is_host: bool, timeout_s: float) -> TCPStore:
    """The meeting point of a group. Its host (rank 0) may bind port 0 and then announce `store.port`."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=is_host, timeout=timeout, wait_for_workers=False)


def init_communicator(
    rank: int, size: int, store: Store | None, *, backend: str, timeout_s: float, address: str | None = None
) -> Communicator:
    """Join the group of `size` ranks that meet in `store`; a group of one needs neither store nor backend.

    `timeout_s` bounds the wait for the others here and in every later collective. `address` is the one by which the
    other ranks reach this host; None leaves gloo to look the host's name up.
    """
    if size == 1:
        return Communicator()
    if store is None:
        raise ValueError(f"a group of {size} ranks needs a store to meet in")
    timeout = timedelta(seconds=timeout_s)
    if address is not None and (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    shared = None
    if backend == "gloo":
        shared = _share_memory(rank, size, PrefixStore("choral/shared-memory", store), timeout_s)
        way = "gloo" if shared is None else "shared memory"
        _log.info("rank %d of %d exchanges activations through %s", rank, size, way)
    return Communicator(dist.group.WORLD, shared)


def interface_of(address: str) -> str | None:
    """The network interface with this address; None where no interface of this host has it.

    Without its name gloo listens where the host's own name leads, which often is the loopback interface.
    """
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(item.address == address for item in found)), None)


def _share_memory(rank: int, size: int, store: Store, timeout_s: float) -> SharedMemory | None:
    """Memory that all ranks share; None where they are on several hosts or one lacks the C++ kernels."""
    store.set(f"place{rank}", _place(rank))
    places = {store.get(f"place{other}") for other in range(size)}
    if len(places) > 1:
        return None
    if rank == 0:
        store.set("path", str(SharedMemory.create(size)))
    path = Path(store.get("path").decode())
    shared = SharedMemory(path, rank, size, timeout_s)
    dist.barrier()
    if rank == 0:
        path.unlink()
    return shared


def _place(rank: int) -> str:
    """Equal for ranks that see the same processes and files; unique for one that can share with nobody."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if cpu_kernels(torch.device("cpu")) is None or not boot.exists():
        return f"alone {rank}"
    return f"{boot.read_text()} {os.stat('/proc/self/ns/pid').st_ino} {os.stat('/dev/shm').st_dev}"
