"""One rank's model and KV cache, and the step every rank runs alike. Knows tensors, not requests.

`run` is the same call on every rank. Rank 0 makes it through the engine, the others follow it in `workers.lockstep`.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from kernels import ops
from kernels.implementation import triton_kernels
from kernels.transfer import sent
from workers import dealt_draws
from workers.checkpoint import weights_digest
from workers.config import EngineConfig
from workers.cuda_graphs import Bucket, DecodeGraphs
from workers.loader import load_model, resolve_dtype
from workers.model_config import ModelConfig
from workers.step_input import StepInput
from workers.tensor_parallel import Communicator

log = logging.getLogger(__name__)


def fingerprint(config: EngineConfig) -> str:
    """Identifies all that fixes a child's bits beside its request: the model, and how and by what it is computed.

    A group that does not shard exactly has bits of its own at every size.
    """
    device = resolve_device(config.device)
    tp = 0 if config.shards_exactly(device.type) else config.tp
    how = (version("choral"), str(resolve_dtype(config.dtype, device)), device.type, config.block_size, tp)
    return hashlib.sha256(repr((weights_digest(Path(config.model_folder)), how)).encode()).hexdigest()[:16]


class ModelRunner:
    """Loads this rank's shard and allocates its KV blocks. Raises ValueError naming the option that does not fit."""

    def __init__(self, config: EngineConfig, comm: Communicator) -> None:
        self.share_prefix = True
        """Off: siblings read their common blocks one by one. For measurements; it changes no bit."""
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.model_config = ModelConfig.from_folder(config.model_folder)
        self.model = load_model(
            config.model_folder,
            dtype=self.dtype,
            device=self.device,
            comm=comm,
            exact=config.shards_exactly(self.device.type),
            max_len=config.max_model_len,
        )
        num_blocks = self._num_blocks(config)
        self.max_model_len = _fitting_len(config, self.model.max_len, num_blocks)
        self.allocate(num_blocks, config.block_size)
        log.info(
            "%s; %s, %d KV blocks of %d",
            ops.implementation(self.device),
            self.dtype,
            num_blocks,
            config.block_size,
        )

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """A new, empty KV cache; for a rank alone on a GPU with Triton also new CUDA graphs, which hold its address."""
        config = self.model_config
        self.kv = ops.KVCache.allocate(
            config.num_layers,
            num_blocks,
            self.model.local_kv_heads,
            config.head_dim,
            block_size,
            self.dtype,
            self.device,
        )
        alone = self.model.comm.size == 1
        graphs = alone and triton_kernels(self.device) is not None
        self.graphs = DecodeGraphs(self._logits, self.device) if graphs else None

    @property
    def exact(self) -> bool:
        """Whether a row's bits never depend on its batch. Computes: the linears are the part that is not ours."""
        if self.device.type != "cpu":
            return False
        layer = self.model.layers[0].weights()
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down, self.model.head)
        return all(ops.check_row_invariance(linear, sizes=(2, 7, 33)) for linear in linears)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, over all ranks of the group."""
        return self._bytes_per_block(self.model_config.num_kv_heads, self.kv.block_size)

    def _bytes_per_block(self, kv_heads: int, block_size: int) -> int:
        model = self.model_config
        return ops.KVCache.bytes_per_block(model.num_layers, kv_heads, model.head_dim, block_size, self.dtype)

    def _num_blocks(self, config: EngineConfig) -> int:
        """Equal on every rank: counted for the rank with the most heads, so one scheduler fits all."""
        if config.kv_blocks is not None:
            return config.kv_blocks
        size = self._bytes_per_block(-(-self.model_config.num_kv_heads // config.tp), config.block_size)
        return max(2, int(config.kv_memory_gib * 2**30) // size)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> Tensor | None:
        """Copy blocks and run the model on [T] tokens.

        Returns this rank's part of the logits of the M rows that draw, [M, its part of the vocabulary]; None if M is 0.
        """
        if step.copies.shape[0]:
            self.kv.copy_blocks(step.copies)
        bucket = Bucket.of(step, self.kv.block_size) if self.graphs is not None else None
        if self.graphs is not None and bucket is not None:
            return self.graphs.run(bucket, step, self.share_prefix)
        batch = ops.AttentionBatch.build(
            step.query_starts.int(),
            step.context_lens.int(),
            step.block_tables.int(),
            step.positions,
            step.slots,
            self.kv,
            share_prefix=self.share_prefix,
        )
        rows = sent(step.logit_rows, self.device)
        hidden = self.model.forward(sent(step.token_ids, self.device), batch, self.kv, rows)
        return self.model.logits(hidden) if len(rows) else None

    def run(self, step: StepInput, draws: Callable[[], ops.SampleBatch]) -> ops.SampleResult | None:
        """Execute a step, and draw what `draws` says if there are rows to draw from; the same on every rank.

        `draws` is asked while a GPU computes; the result is on its way, too.
        """
        logits = self.execute(step)
        return None if logits is None else self.draw(logits, draws())

    @torch.inference_mode()
    def draw(self, logits: Tensor, batch: ops.SampleBatch) -> ops.SampleResult:
        """One token per draw from what `execute` returned."""
        return dealt_draws.draw(logits, batch, self.model.comm, self.model.plan.vocab)

    def _logits(self, token_ids: Tensor, batch: ops.AttentionBatch) -> Tensor:
        """Logits of every row of a batch."""
        return self.model.logits(self.model.forward(token_ids, batch, self.kv))


def resolve_device(device: str) -> torch.device:
    """ "auto" is this process's GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def resolve_backend(device: str) -> str:
    """The collectives' backend for a device option."""
    return "nccl" if resolve_device(device).type == "cuda" else "gloo"


def set_threads(threads: int | None) -> None:
    """Fix torch's thread count for this process; None leaves what the environment says."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _fitting_len(config: EngineConfig, limit: int, num_blocks: int) -> int:
    """Longest sequence a pool of `num_blocks` can always finish: a prompt's partly filled block is held twice."""
    fitting = (num_blocks - 1) * config.block_size
    if config.max_model_len is not None and config.max_model_len > fitting:
        raise ValueError(f"max_model_len {config.max_model_len} needs more KV blocks than the {num_blocks} there are")
    return min(limit, fitting)
