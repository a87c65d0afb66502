"""The engine with a real model: exact children whatever runs beside them, prompt once, no leak.

C2 is checked as equality of token ids and of log-probability bits.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines import Lab, family, finish
from workers.engine import NOTHING_TO_DRAW
from workers.outputs import ChildDelta, ChildRef

PROMPT = [1, 40, 77, 205, 9, 31, 64, 128, 250, 17, 3, 99, 180, 44, 5, 210, 33, 7, 8, 61, 150, 22]
OTHER = [2, 200, 13, 55, 90]


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Lab:
    """The embedded model in its default data type."""
    return Lab(embedded_model)


@pytest.fixture(scope="module")
def family_of_eight(lab: Lab):
    return lab.run([family("p", PROMPT, range(8))])


def test_c2_children_differ_and_every_run_repeats_them(lab: Lab, family_of_eight):
    assert len({bits[0] for bits in family_of_eight.values()}) == 8
    assert lab.run([family("p", PROMPT, range(8))]) == family_of_eight


def test_c2_a_family_equals_its_children_replayed_one_by_one(lab: Lab, family_of_eight):
    for sample in range(8):
        assert lab.run([family("p", PROMPT, [sample])])["p", sample] == family_of_eight["p", sample]


def test_c2_strangers_in_the_batch_change_nothing(lab: Lab, family_of_eight):
    strangers = [
        family("q", OTHER, range(5), seed=1, max_tokens=7, temperature=0.3),
        family("r", OTHER * 9, range(3), seed=2, top_p=0.5, logprobs=None),
        family("s", PROMPT, range(2), seed=3, repetition_penalty=1.3, top_k=4),
    ]
    crowd = lab.run([*strangers[:2], family("p", PROMPT, range(8)), strangers[2]])
    assert {key: bits for key, bits in crowd.items() if key[0] == "p"} == family_of_eight


@pytest.mark.parametrize("max_step_tokens", [1, 5, 16, 17])
def test_c2_prefill_chunks_change_nothing(lab: Lab, family_of_eight, max_step_tokens: int):
    assert lab.run([family("p", PROMPT, range(8))], max_step_tokens=max_step_tokens) == family_of_eight


def test_c2_waves_change_nothing(lab: Lab, family_of_eight):
    assert lab.run([family("p", PROMPT, range(8))], max_running=3) == family_of_eight


def test_c2_preemption_changes_nothing(lab: Lab):
    long = family("p", PROMPT, range(6), max_tokens=40)
    relaxed = lab.run([long])
    engine = lab.engine(kv_blocks=12)
    engine.submit([long])
    assert finish(engine, [long]) == relaxed
    assert engine.scheduler.counters.preemptions > 0


def test_c2_a_warm_prefix_cache_changes_nothing(lab: Lab):
    request = family("p", PROMPT * 3, range(4))
    engine = lab.engine()
    engine.submit([request])
    cold = finish(engine, [request])
    computed = engine.scheduler.counters.prompt_tokens_computed
    engine.submit([request])
    assert finish(engine, [request]) == cold
    assert engine.scheduler.counters.prompt_tokens_computed - computed == len(PROMPT * 3) - 64
    assert lab.run([request], prefix_cache=False) == cold


def test_c2_blocks_filled_by_decoding_serve_a_later_prompt_exactly(lab: Lab):
    first = family("p", PROMPT, [0], max_tokens=30)
    engine = lab.engine()
    engine.submit([first])
    generated = finish(engine, [first])["p", 0][0]
    second = family("q", [*PROMPT, *generated], range(3), seed=11)
    engine.submit([second])
    warm = finish(engine, [second])
    assert engine.scheduler.counters.prompt_tokens_cached >= 48
    assert warm == lab.run([second], prefix_cache=False)


def test_c2_noise_depends_on_seed_prompt_number_and_sample(lab: Lab):
    flat = {"temperature": 2.0, "logprobs": None}
    runs = [
        lab.run([family("p", PROMPT, [0, 1], seed=5, **flat)]),
        lab.run([family("p", PROMPT, [0, 1], seed=6, **flat)]),
        lab.run([family("p", PROMPT, [0, 1], seed=5, prompt_number=1, **flat)]),
    ]
    assert len({bits[0] for run in runs for bits in run.values()}) == 6


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
mixes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 4),
        "prompt": st.sampled_from([OTHER, PROMPT[:16], PROMPT, PROMPT * 2]),
        "params": st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, PENALTIES, {"temperature": 0.0}]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(mixes, min_size=1, max_size=4),
    st.integers(1, 64),
    st.integers(1, 6),
    st.sampled_from([12, 64]),
    st.booleans(),
)
def test_c2_any_mix_equals_each_child_alone(lab: Lab, mix, max_step_tokens, max_running, kv_blocks, prefix_cache):
    families = [
        family(str(i), spec["prompt"], range(spec["n"]), seed=spec["seed"], max_tokens=6, **spec["params"])
        for i, spec in enumerate(mix)
    ]
    together = lab.run(
        families,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        kv_blocks=kv_blocks,
        prefix_cache=prefix_cache,
    )
    for i, spec in enumerate(mix):
        last = spec["n"] - 1
        alone = family(str(i), spec["prompt"], [last], seed=spec["seed"], max_tokens=6, **spec["params"])
        assert lab.run([alone])[str(i), last] == together[str(i), last]


def test_a_child_without_a_token_to_draw_fails_by_name_and_alone(lab: Lab):
    nothing = {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 3, "logprobs": None}
    engine = lab.engine()
    engine.submit([family("p", PROMPT, range(2), **nothing), family("q", PROMPT, [0], max_tokens=2)])
    parents: dict[str, list[ChildDelta]] = {"p": [], "q": []}
    while engine.has_work:
        for name, delta in engine.step().get("sink", {}).items():
            parents[name] += delta.children.values()
    assert [(d.index, d.token_ids, d.error) for d in parents["p"]] == [(i, [], NOTHING_TO_DRAW) for i in range(2)]
    assert [d.error for d in parents["q"]] == [None, None] and engine.blocks.num_used == 0


@pytest.mark.parametrize("length", [9, 15, 16, 17, 40])
def test_c3_a_prompt_is_computed_once_for_sixteen_children(lab: Lab, length: int):
    engine = lab.engine(prefix_cache=False)
    request = family("p", (PROMPT * 2)[:length], range(16), max_tokens=3)
    engine.submit([request])
    finish(engine, [request])
    assert engine.stats()["prompt_tokens_asked_total"] == length
    assert engine.stats()["prompt_tokens_computed_total"] == length


def test_a_family_of_64_with_8_slots_and_a_pool_for_five(lab: Lab):
    engine = lab.engine(max_running=8, kv_blocks=2 + 5 * 2)
    request = family("p", PROMPT, range(64), max_tokens=20)
    engine.submit([request])
    results = finish(engine, [request])
    assert len(results) == 64 and all(len(bits[0]) == 20 for bits in results.values())


def test_c5_aborts_in_every_phase_leave_nothing(lab: Lab):
    for phase in range(5):
        engine = lab.engine(max_running=2, max_step_tokens=8)
        engine.submit([family("p", PROMPT, range(3)), family("q", OTHER, range(2))])
        for _ in range(phase):
            engine.step()
        engine.abort([ChildRef("p", 1), ChildRef("p", 1), ChildRef("unknown", 0)])
        engine.abort([ChildRef("q", 0), ChildRef("q", 1)])
        engine.scheduler.check()
        engine.abort_sink("sink")
        assert not engine.has_work and engine.blocks.num_used == 0
        assert engine.stats()["children_running"] == engine.stats()["children_waiting"] == 0


def test_stop_ids_end_a_child_and_min_tokens_bans_them(lab: Lab):
    free = lab.run([family("p", PROMPT, [0])])["p", 0][0]
    stopped = lab.run([family("p", PROMPT, [0], stop_token_ids=(free[4],))])["p", 0]
    assert stopped[0] == free[: free.index(free[4]) + 1] and stopped[2] == "stop"
    banned = lab.run([family("p", PROMPT, [0], stop_token_ids=(free[0],), min_tokens=12)])["p", 0]
    assert free[0] not in banned[0] and banned[2] == "length"


def test_bias_and_allowed_ids_steer_the_draw(lab: Lab):
    forced = lab.run([family("p", PROMPT, [0], logit_bias=((123, 100.0),), logprobs=None)])["p", 0]
    assert set(forced[0]) == {123}
    allowed = lab.run([family("p", PROMPT, range(3), allowed_token_ids=(5, 6, 7), temperature=2.0)])
    assert {token for bits in allowed.values() for token in bits[0]} <= {5, 6, 7}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (family("p", [], [0]), "prompt"),
        (family("p", [49152], [0]), "ids"),
        (family("p", PROMPT, [0], max_tokens=10_000), "max_model_len"),
    ],
)
def test_what_can_never_run_is_refused_and_nothing_stays(lab: Lab, request_, words: str):
    engine = lab.engine()
    with pytest.raises(ValueError, match=words):
        engine.submit([family("ok", PROMPT, [0]), request_])
    assert not engine.has_work


def test_a_parent_submitted_twice_is_refused_whole(lab: Lab):
    engine = lab.engine()
    engine.submit([family("p", PROMPT, [0])])
    with pytest.raises(ValueError, match="already"):
        engine.submit([family("q", PROMPT, [0]), family("p", PROMPT, [0])])
    assert engine.stats()["families_alive"] == 1


def test_a_failed_group_ends_every_child_with_its_own_error(lab: Lab):
    engine = lab.engine()
    engine.submit([family("p", PROMPT, range(3))])
    engine.step()
    deltas = engine.fail_all("gone")["sink"]["p"].children
    assert {i: d.error for i, d in deltas.items()} == dict.fromkeys(range(3), "gone")
    assert not engine.has_work and engine.blocks.num_used == 0
