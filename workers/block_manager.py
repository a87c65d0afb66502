"""Who owns which KV block: reference counts, the free list, and the prefix cache by content.

Pure bookkeeping over block numbers; it never touches a tensor and knows neither sequences nor families. The scheduler
calls it. A block is free, or held by one or more block tables; a free block keeps its content until it is handed out
again, so the prefix cache costs no memory of its own.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""


def content_digest(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest (16 bytes) of a full block: its own tokens and, through `previous`, all tokens before it."""
    return blake2b(previous + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens each, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest unused first. The caller has checked `num_free`."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]
        self._references[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; reviving cached blocks out of the free list is allowed."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block. Blocks with cached content are reused last, deepest block first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)

    def commit(self, block: int, digest: bytes) -> None:
        """Publish a full, computed block to the prefix cache; the first block with a content keeps the name."""
        if self.prefix_cache and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def match(self, token_ids: Sequence[int], max_blocks: int) -> tuple[list[int], list[bytes]]:
        """Longest cached prefix of `token_ids`, at most `max_blocks` blocks: blocks and digests, not yet shared."""
        blocks: list[int] = []
        digests: list[bytes] = []
        size, digest = self.block_size, ROOT
        for start in range(0, max_blocks * size if self.prefix_cache else 0, size):
            digest = content_digest(digest, token_ids[start : start + size])
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
            digests.append(digest)
        return blocks, digests

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the reference counts are exactly those of `tables`."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._references, "reference counts do not match the block tables"
        assert {block for block, count in enumerate(expected) if count == 0} == set(self._free), "free list is wrong"
        assert all(self._digest_of[block] == digest for digest, block in self._block_of.items()), "cache maps disagree"
