"""The work list of split attention: everything once, whole shared chunks together, nothing across strangers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.split_plan import CHUNK, TOKENS, SplitPlan

BLOCK = 32
WIDTH = 16


def plan(parts: list[tuple[int, int, list[int]]], share: bool = True, block: int = BLOCK) -> SplitPlan:
    """From (rows, context length, table) of each sequence."""
    starts = torch.tensor([0, *[rows for rows, _, _ in parts]]).cumsum(0)
    lens = torch.tensor([length for _, length, _ in parts])
    width = max((len(table) for _, _, table in parts), default=1)
    tables = torch.tensor([table + [0] * (width - len(table)) for _, _, table in parts]).reshape(-1, width)
    return SplitPlan.build(starts, lens, tables, block, share)


def siblings(count: int, prompt_blocks: int, length: int, first: int = 100) -> list[tuple[int, int, list[int]]]:
    """Decoding children that share their first blocks."""
    shared = list(range(first, first + prompt_blocks))
    own = WIDTH - prompt_blocks
    return [(1, length, shared + [first + 1000 * (i + 1) + j for j in range(own)]) for i in range(count)]


def test_whole_shared_chunks_are_visited_once_for_all_siblings():
    got = plan(siblings(5, 9, 300))
    assert got.items.tolist() == [[0, 5, 0, 0, 1], [0, 5, 0, 1, 2], *[[i, 1, i, 2, 3] for i in range(5)]]
    assert got.states.tolist() == [0, 3, 6, 9, 12, 15] and got.num_states == 15 and got.count.tolist() == [7]


def test_without_sharing_everybody_visits_all_alone():
    assert len(plan(siblings(5, 9, 300), share=False).items) == 15


def test_a_large_family_is_cut_into_tiles():
    got = plan(siblings(2 * TOKENS + 3, 4, 128 + 1))
    assert got.items[:3].tolist() == [[0, 16, 0, 0, 1], [16, 16, 16, 0, 1], [32, 3, 32, 0, 1]]


def test_families_over_one_system_prompt_share_that_and_then_part():
    first, second = siblings(2, 8, 300), siblings(2, 8, 300, first=500)
    system = list(range(1, 5))
    parts = [(rows, length, system + table[4:]) for rows, length, table in [*first, *second]]
    assert plan(parts).items[:3].tolist() == [[0, 4, 0, 0, 1], [0, 2, 0, 1, 2], [2, 2, 2, 1, 2]]


def test_padding_of_tables_is_nothing_shared():
    """Both tables are zero behind their first block, but neither sequence has so many positions."""
    assert len(plan([(1, 20, [1] + [0] * 9), (1, 20, [1] + [0] * 9)]).items) == 2


def test_a_prompt_takes_its_chunks_in_one_go_and_only_those_it_sees():
    got = plan([(40, 300, list(range(1, 11)))])
    assert got.items.tolist() == [[32, 8, 0, 0, 3], [16, 16, 0, 0, 3], [0, 16, 0, 0, 3]]
    assert got.states.tolist() == list(range(41))
    assert plan([(40, 130, list(range(1, 11)))]).items[-1].tolist() == [0, 16, 0, 0, 1]


def test_an_empty_step():
    got = SplitPlan.build(torch.zeros(1), torch.zeros(0), torch.zeros(0, 1), BLOCK, True)
    assert len(got.items) == 0 and got.states.tolist() == [0]


sequences = st.tuples(st.integers(1, 40), st.integers(0, 400), st.lists(st.integers(1, 2), min_size=14, max_size=14))


@settings(max_examples=60, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=6), st.booleans(), st.sampled_from([32, 48]))
def test_every_row_meets_every_chunk_it_sees_once_in_its_own_blocks(drawn, share: bool, block: int):
    parts = [(rows, rows + before, table) for rows, before, table in drawn]
    got = plan(parts, share, block)
    owner = [s for s, (rows, _, _) in enumerate(parts) for _ in range(rows)]
    position = [length - rows + i for rows, length, _ in parts for i in range(rows)]
    met: list[list[int]] = [[] for _ in owner]
    results = [0] * len(owner)
    for first, rows, sequence, begin, end in got.items.tolist():
        assert 1 <= rows <= TOKENS
        for row in range(first, first + rows):
            met[row] += range(begin, end)
            results[row] += 1
            if owner[row] != sequence:
                seen = slice(begin * CHUNK // block, -(-end * CHUNK // block))
                assert parts[owner[row]][2][seen] == parts[sequence][2][seen]
    for row, chunks in enumerate(met):
        visible = position[row] // CHUNK + 1
        assert sorted(chunks)[:visible] == list(range(visible)) and len(set(chunks)) == len(chunks)
    assert got.states.diff().tolist() == results


@pytest.mark.parametrize("share", [True, False])
def test_one_row_chunks_are_split_and_longer_ones_are_not(share: bool):
    got = plan([(1, 300, list(range(1, 11))), (2, 300, list(range(1, 11)))], share)
    assert got.states.diff().tolist() == [3, 1, 1]
