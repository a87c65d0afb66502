"""The scheduler without a model: families run to their end in waves, under pressure and under cancellation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.block_manager import BlockManager
from workers.outputs import ChildSpec, FamilyRequest
from workers.sampling_params import SamplingParams
from workers.scheduler import Batch, Scheduler
from workers.sequence import Status

NO_EOS: frozenset[int] = frozenset()


def scheduler(
    num_blocks: int = 64, *, max_running: int = 8, max_step_tokens: int = 32, cache: bool = False
) -> Scheduler:
    blocks = BlockManager(num_blocks, 16, prefix_cache=cache)
    return Scheduler(blocks, max_running=max_running, max_step_tokens=max_step_tokens)


def family(name: str, prompt: int | list[int], n: int, max_tokens: int = 4, temperature: float = 1.0) -> FamilyRequest:
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    children = tuple(ChildSpec(i, i) for i in range(n))
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=temperature)
    return FamilyRequest(name, 0, tokens, children, params, "sink")


def run_step(s: Scheduler) -> Batch:
    """Schedule and pretend the model ran; every draw gets a token of its own."""
    batch = s.schedule()
    s.check()
    for chunk in batch.chunks:
        assert chunk.count > 0 and s.blocks.blocks_for(chunk.start + chunk.count) <= len(chunk.table.blocks)
    s.computed(batch)
    for chunk in batch.chunks:
        chunk.family.forked |= chunk.sequence is None and bool(chunk.draws)
        for sequence in chunk.draws:
            sequence.append(1000 + sequence.index, NO_EOS)
            if sequence.finish_reason is not None:
                s.finish(sequence)
    s.check()
    return batch


def run_all(s: Scheduler, limit: int = 5000) -> int:
    for steps in range(limit):
        if not s.families:
            return steps
        assert run_step(s).chunks, "nothing to run, yet families are left"
    raise AssertionError("did not finish")


def test_the_prompt_is_computed_once_for_all_children():
    for prompt in (5, 15, 16, 17, 40):
        s = scheduler()
        s.add(family("p", prompt, 16))
        run_all(s)
        assert s.counters.prompt_tokens_computed == prompt
        assert s.blocks.num_used == 0


def test_all_children_draw_their_first_token_from_the_last_prompt_row():
    s = scheduler(max_running=2)
    s.add(family("p", 40, 6))
    first, second = run_step(s), run_step(s)
    assert first.chunks[0].draws == [] and [c.index for c in second.chunks[0].draws] == list(range(6))


def test_siblings_share_full_blocks_and_copy_only_the_partly_filled_one():
    s = scheduler()
    s.add(family("p", 40, 3))
    s.add(family("q", 32, 3))
    for _ in range(4):
        run_step(s)
    for name, shared, copied in (("p", 2, True), ("q", 2, False)):
        tables = [c.table.blocks for c in s.families[name, 0].live]
        stem = s.families[name, 0].stem.blocks
        assert all(table[:shared] == stem[:shared] for table in tables)
        assert len({table[shared] for table in tables}) == 3
        assert (len(stem) > shared) == copied


def test_memory_of_a_family_is_the_prompt_once_the_suffixes_and_a_block_per_child():
    s = scheduler(256, max_running=32)
    s.add(family("p", 100, 32, max_tokens=20))
    most = 0
    while s.families:
        run_step(s)
        most = max(most, s.blocks.num_used)
    assert most <= s.blocks.blocks_for(100) + 32 * (s.blocks.blocks_for(20) + 1)


def test_a_family_larger_than_the_running_limit_runs_in_waves():
    s = scheduler(max_running=8)
    s.add(family("p", 20, 64))
    most = 0
    while s.families:
        run_step(s)
        most = max(most, len(s.running))
    assert most == 8


def test_a_pool_for_few_children_finishes_many_with_preemption():
    s = scheduler(12, max_running=64)
    s.add(family("p", 20, 64, max_tokens=60))
    run_all(s)
    assert s.counters.preemptions > 0 and s.counters.recomputed_tokens > 0


def test_a_pool_for_exactly_one_sequence_still_finishes_families_that_compete():
    s = scheduler(6, max_running=8)
    for name in "abc":
        s.add(family(name, 25, 3, max_tokens=50))
    run_all(s)
    assert s.blocks.num_used == 0


def test_several_short_prompts_share_a_step():
    s = scheduler()
    s.add(family("p", 10, 2))
    s.add(family("q", 10, 2))
    assert len(run_step(s).chunks) == 2


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_end():
    s = scheduler(cache=True)
    s.add(family("p", 40, 2))
    run_all(s)
    s.add(family("q", 40, 2))
    run_step(s)
    assert s.families["q", 0].cached_tokens == 32
    run_all(s)
    assert s.counters.prompt_tokens_computed == 40 + 8


def test_text_generated_earlier_is_found_in_the_cache():
    s = scheduler(cache=True)
    s.add(family("p", 10, 1, max_tokens=30))
    run_all(s)
    s.add(family("q", [*range(10), *[1000] * 30], 1))
    run_step(s)
    assert s.families["q", 0].cached_tokens == 32


def test_siblings_lie_side_by_side_in_the_batch():
    s = scheduler(max_running=32)
    s.add(family("p", 10, 3, max_tokens=9))
    s.add(family("q", 10, 3, max_tokens=9))
    for _ in range(3):
        batch = run_step(s)
    assert [c.family.request.parent_id for c in batch.chunks] == ["p"] * 3 + ["q"] * 3


def test_a_family_is_known_once():
    s = scheduler()
    s.add(family("p", 10, 1))
    try:
        s.add(family("p", 10, 1))
    except ValueError as error:
        assert "already" in str(error)
    else:
        raise AssertionError("accepted twice")


families = st.tuples(
    st.integers(1, 50), st.integers(1, 6), st.integers(1, 40), st.integers(0, 3), st.sampled_from([0.0, 1.0])
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(families, min_size=1, max_size=6),
    st.integers(7, 20),
    st.integers(1, 8),
    st.integers(1, 64),
    st.booleans(),
    st.data(),
)
def test_any_mix_finishes_or_is_cancelled_and_leaves_nothing(specs, num_blocks, max_running, budget, cache, data):
    s = scheduler(num_blocks, max_running=max_running, max_step_tokens=budget, cache=cache)
    for number, (prompt, n, max_tokens, alphabet, temperature) in enumerate(specs):
        tokens = [i % (alphabet + 1) for i in range(prompt)]
        s.add(family(str(number), tokens, n, max_tokens, temperature))
    for _ in range(data.draw(st.integers(0, 12))):
        if s.families:
            run_step(s)
            s.abort(
                data.draw(st.sampled_from([p for p, _ in s.families] or ["0"])),
                data.draw(st.sets(st.integers(0, 5), max_size=3)),
            )
            s.check()
    run_all(s)
    assert s.blocks.num_used == 0 and not s.running and s.num_waiting == 0


def test_finishing_is_idempotent_in_every_state():
    s = scheduler(max_running=1)
    s.add(family("p", 20, 3))
    run_step(s)
    run_step(s)
    sequences = s.families["p", 0].sequences
    assert {c.status for c in sequences} == {Status.RUNNING, Status.WAITING}
    for sequence in [*sequences, *sequences]:
        s.finish(sequence)
    assert not s.families and s.blocks.num_used == 0


def test_a_greedy_family_takes_one_slot_and_weighs_its_children():
    s = scheduler(max_running=2)
    s.add(family("p", 20, 6, temperature=0.0))
    s.add(family("q", 10, 3))
    assert (s.num_running, s.num_waiting) == (0, 9)
    assert [len(chunk.draws) for chunk in run_step(s).chunks] == [1, 3]
    assert [chunk.family.request.parent_id for chunk in run_step(s).chunks] == ["p", "q"]
    assert (s.num_running, s.num_waiting) == (7, 2)
    s.abort("p", [0, 4])
    assert (s.num_running, s.num_waiting) == (5, 2)


def test_memory_of_a_greedy_family_is_that_of_one_child():
    peaks = []
    for n in (1, 32):
        s = scheduler(256, max_running=32)
        s.add(family("p", 100, n, max_tokens=40, temperature=0.0))
        peaks.append(0)
        while s.families:
            run_step(s)
            peaks[-1] = max(peaks[-1], s.blocks.num_used)
    assert peaks[0] == peaks[1]
