"""Size of the cache and copying of blocks."""

import torch

from kernels.kv_cache import KVCache


def test_bytes_per_block_times_blocks_is_the_size():
    kv = KVCache.allocate(3, 7, 2, 16, 8, torch.bfloat16, "cpu")
    assert kv.nbytes == 7 * KVCache.bytes_per_block(3, 2, 16, 8, torch.bfloat16)
    assert (kv.num_blocks, kv.block_size) == (7, 8)


def test_blocks_are_copied_in_every_layer_and_nothing_else_changes():
    kv = KVCache.allocate(3, 6, 2, 8, 4, torch.float32, "cpu")
    kv.k.normal_()
    kv.v.normal_()
    before = kv.k.clone(), kv.v.clone()
    kv.copy_blocks(torch.tensor([[0, 4], [0, 5], [2, 1]], dtype=torch.int32))
    for cache, old in zip((kv.k, kv.v), before, strict=True):
        assert torch.equal(cache, old[:, [0, 2, 2, 3, 0, 0]])


def test_copying_no_block_is_allowed():
    kv = KVCache.allocate(1, 2, 1, 8, 4, torch.float32, "cpu")
    kv.copy_blocks(torch.zeros(0, 2, dtype=torch.int64))
    assert not kv.k.any()
