import dataclasses
import time
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kernels.implementation import cpu_kernels
from tests.ranks import run_ranks
from workers.model_config import ModelConfig
from workers.tensor_parallel import Communicator, ShardPlan, Split, init_communicator, vocab_block

SMOLLM2 = ModelConfig.from_values(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    }
)


@given(
    total=st.integers(1, 5000),
    unit=st.sampled_from([1, 8, 64]),
    shares=st.lists(st.floats(0.001, 1000), min_size=1, max_size=9),
)
def test_dealing_leaves_nobody_empty_and_cuts_at_units(total, unit, shares):
    assume(-(-total // unit) >= len(shares))
    split = Split.deal(total, shares, unit)
    assert split.total == total
    assert len(split.sizes) == len(shares)
    assert min(split.sizes) >= 1
    assert all(border % unit == 0 for border in list(accumulate(split.sizes))[:-1])


@given(blocks=st.integers(9, 5000), shares=st.lists(st.floats(1, 2), min_size=1, max_size=4))
def test_dealing_is_near_to_the_shares(blocks, shares):
    split = Split.deal(blocks, shares, 1)
    for size, share in zip(split.sizes, shares, strict=True):
        assert abs(size - blocks * share / sum(shares)) < 1


def test_too_few_units_are_refused():
    with pytest.raises(ValueError, match="3 ranks"):
        Split.deal(128, [1, 1, 1], 64)


def test_the_parts_of_a_split_follow_each_other():
    split = Split((2, 1, 3)).scaled(10)
    assert [split.of(rank) for rank in range(3)] == [slice(0, 20), slice(20, 30), slice(30, 60)]


def test_three_kv_heads_on_two_ranks_are_balanced_by_the_feed_forward_columns():
    plan = ShardPlan.build(SMOLLM2, 2, exact=False)
    assert plan.kv_heads.sizes == (2, 1)
    per_head, per_column = (2 * 3 + 2) * 64, 3
    weights = [
        per_head * heads + per_column * columns
        for heads, columns in zip(plan.kv_heads.sizes, plan.ffn.sizes, strict=True)
    ]
    assert abs(weights[0] - weights[1]) <= 64 * per_column
    assert all(size % 64 == 0 for size in plan.ffn.sizes)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_holds_a_part_of_everything(size, exact):
    plan = ShardPlan.build(SMOLLM2, size, exact=exact)
    assert plan.size == size
    for split, total in ((plan.kv_heads, 3), (plan.ffn, 1536), (plan.hidden, 576), (plan.vocab, 49152)):
        assert split.total == total
        assert min(split.sizes) > 0


@pytest.mark.parametrize("size", [0, 4, 64])
def test_an_impossible_size_is_refused_naming_the_possible_ones(size):
    with pytest.raises(ValueError, match=rf"tp = {size}.*3 KV heads.*from 1 to 3"):
        ShardPlan.build(SMOLLM2, size, exact=True)


@given(vocab=st.integers(64, 300_000), heads=st.integers(2, 16), size=st.integers(1, 16))
def test_the_vocabulary_is_cut_at_blocks_that_do_not_depend_on_the_group(vocab, heads, size):
    assume(size <= heads)
    config = dataclasses.replace(SMOLLM2, vocab_size=vocab, num_heads=heads, num_kv_heads=heads)
    plan = ShardPlan.build(config, size, exact=True)
    assert plan.vocab.total == vocab
    assert all(plan.vocab.of(rank).start % vocab_block(vocab) == 0 for rank in range(size))


def test_a_group_of_one_needs_no_process_group():
    comm = init_communicator(0, 1, None, backend="nccl", timeout_s=1)
    x = torch.randn(2, 3)
    assert comm.all_reduce(x) is x
    assert comm.all_gather_columns(x, [3]) is x
    assert not torch.distributed.is_initialized()


def test_a_group_of_more_needs_a_store():
    with pytest.raises(ValueError, match="store"):
        init_communicator(0, 2, None, backend="gloo", timeout_s=1)


WIDTHS = (5, 1, 3)
SPANS = (slice(0, 40), slice(39, 65), slice(0, 0))
NATIVE = cpu_kernels(torch.device("cpu")) is not None


def _part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(65, WIDTHS[rank], generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(comm: Communicator) -> dict[str, list[torch.Tensor]]:
    """Gathers, sums, sums of single rows, and exchanged rows, in both ways ranks can exchange."""
    assert (comm.shared is not None) == NATIVE
    shared, results = comm.shared, {}
    for way in ("shared", "gloo"):
        comm.shared = shared if way == "shared" else None
        for dtype in (torch.float32, torch.bfloat16):
            part = _part(comm.rank, dtype)
            column = part[:, :1].contiguous()
            single = column if way == "shared" else column[:2]
            rows = torch.cat([comm.all_reduce(row[None].clone()) for row in single])
            gathered = comm.all_gather_columns(part, WIDTHS)
            exchanged = comm.exchange_rows(part, SPANS, WIDTHS).clone()
            results[f"{way} {dtype}"] = [gathered, comm.all_reduce(column), rows, exchanged]
    return results


def test_collectives_over_three_ranks(tmp_path):
    ranks = run_ranks(_collectives, 3, folder=tmp_path)
    for way, dtype in ((way, dtype) for way in ("shared", "gloo") for dtype in (torch.float32, torch.bfloat16)):
        whole = torch.cat([_part(rank, dtype) for rank in range(3)], dim=1)
        total = sum(_part(rank, dtype)[:, :1].float() for rank in range(3)).to(dtype)
        for results, span in zip(ranks, SPANS, strict=True):
            gathered, reduced, rows, exchanged = results[f"{way} {dtype}"]
            assert torch.equal(exchanged, whole[span])
            assert torch.equal(gathered, whole)
            assert torch.equal(reduced, ranks[0][f"{way} {dtype}"][1])
            torch.testing.assert_close(reduced, total, atol=0.05, rtol=0)
            if way == "shared" and NATIVE:
                # Added in rank order and rounded once, whatever rows are beside.
                assert torch.equal(reduced, total)
                assert torch.equal(rows, reduced)


def _wait_for_a_silent_rank(comm: Communicator) -> list[float]:
    if comm.rank == 1:
        time.sleep(7)
        return []
    waited = []
    for _ in ("shared memory", "gloo"):
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            comm.all_reduce(torch.zeros(1, 1))
        waited.append(time.monotonic() - started)
        comm.shared = None
    return waited


def test_a_silent_rank_is_noticed_within_the_timeout(tmp_path):
    waited, _ = run_ranks(_wait_for_a_silent_rank, 2, folder=tmp_path, timeout_s=3)
    assert len(waited) == 2
    assert all(2 < seconds < 5 for seconds in waited[: 2 if NATIVE else 1])
