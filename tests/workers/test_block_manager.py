"""Reference counts, the order of reuse, and the prefix cache by content."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.block_manager import ROOT, BlockManager, content_digest


def manager(num_blocks: int = 4, prefix_cache: bool = True) -> BlockManager:
    return BlockManager(num_blocks, 16, prefix_cache=prefix_cache)


def test_a_shared_block_is_free_only_after_its_last_release():
    blocks = manager()
    table = blocks.allocate(2)
    blocks.share(table)
    blocks.release(table)
    blocks.check([table])
    blocks.release(table)
    assert blocks.num_free == 4 and blocks.num_used == 0
    blocks.check([])


def test_check_finds_a_lost_reference():
    blocks = manager()
    blocks.allocate(1)
    with pytest.raises(AssertionError):
        blocks.check([])


def test_a_published_block_is_found_again_after_its_release_and_gone_after_reuse():
    blocks = manager()
    tokens = list(range(40))
    (block,) = blocks.allocate(1)
    digest = content_digest(ROOT, tokens[:16])
    blocks.commit(block, digest)
    blocks.release([block])
    assert blocks.match(tokens, 2) == ([block], [digest])
    blocks.share([block])
    blocks.check([[block]])
    blocks.release([block])
    blocks.allocate(4)
    assert blocks.match(tokens, 2) == ([], [])


def test_blocks_without_content_are_reused_before_cached_ones():
    blocks = manager()
    cached, plain = blocks.allocate(2)
    blocks.commit(cached, content_digest(ROOT, range(16)))
    blocks.release([cached, plain])
    assert blocks.allocate(3).count(cached) == 0


def test_match_never_exceeds_the_bound_and_is_off_without_the_cache():
    for prefix_cache, found in ((True, 1), (False, 0)):
        blocks = manager(prefix_cache=prefix_cache)
        first, second = blocks.allocate(2)
        one = content_digest(ROOT, range(16))
        blocks.commit(first, one)
        blocks.commit(second, content_digest(one, range(16, 32)))
        assert len(blocks.match(list(range(32)), 1)[0]) == found


def test_the_digest_depends_on_everything_before_the_block():
    assert content_digest(content_digest(ROOT, [1]), [2]) != content_digest(content_digest(ROOT, [3]), [2])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "commit"]), st.integers(0, 7)), max_size=60))
def test_counts_stay_exact_over_any_history(history: list[tuple[str, int]]):
    blocks = manager(6)
    tables: list[list[int]] = []
    for step, (action, number) in enumerate(history):
        if action == "allocate" and number <= blocks.num_free:
            tables.append(blocks.allocate(number))
        elif action != "allocate" and tables:
            table = tables[number % len(tables)]
            if action == "share":
                blocks.share(table)
                tables.append(list(table))
            elif action == "commit" and table:
                blocks.commit(table[0], content_digest(ROOT, [step]))
            elif action == "release":
                tables.pop(number % len(tables))
                blocks.release(table)
        blocks.check(tables)
    for table in tables:
        blocks.release(table)
    assert blocks.num_used == 0
