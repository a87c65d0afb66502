import asyncio

import pytest

from deploy.bench_load import Grid, Workload
from deploy.bench_run import PromptTokens, Runner, Server, prompt_tokens
from tests.deploy.virtual_server import VirtualServer, chunk, now, run


def workload(repeat=2, ignore_eos=True, **axes):
    known = {
        "prompt_len": [4], "n": [2], "parents": [1], "max_tokens": [4], "top_p": [1.0], "logprobs": [None],
        "temperature": [1.0], "prefix": ["cold"],
    }  # fmt: skip
    rows = Grid(**{**known, **axes}).rows()
    return Workload(rows=rows, repeat=repeat, seed=3, vocab_size=1000, ignore_eos=ignore_eos)


def measure(load, *servers, progress=lambda *args: None, pause_s=0.0):
    async def go():
        asked = [Server(server.client(), f"model {place}") for place, server in enumerate(servers)]
        clocks = {"clock": now, "sleep": asyncio.sleep}
        return await Runner(workload=load, servers=asked, progress=progress, pause_s=pause_s, **clocks).run()

    return run(go())


def test_parents_under_way_stay_constant_and_the_warm_up_is_not_counted():
    server = VirtualServer()
    (result,) = measure(workload(repeat=1, parents=[2], requests=5), server)
    moments = [moment for moment, _ in server.requests]
    # A request takes 1 s. The warm-up is alone; then two at a time.
    assert moments == [0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    ((repetition,),) = result.repetitions
    assert [parent.start_s for parent in repetition.parents] == moments[1:]
    assert {parent.end_s - parent.start_s for parent in repetition.parents} == {1.0}
    assert (len(result.warm_ups), result.errors) == (1, [])


def test_arrivals_do_not_wait_for_answers():
    server = VirtualServer()
    load = workload(repeat=2, rate=[8.0], requests=20)
    (result,) = measure(load, server)
    moments = [moment for moment, _ in server.requests[1:]]
    start = 1.0
    for repetition, measured in enumerate(result.repetitions[0]):
        mine, moments = moments[:20], moments[20:]
        assert mine == pytest.approx([start + arrival for arrival in load.arrivals(0, repetition)], abs=1e-6)
        assert [parent.start_s for parent in measured.parents] == mine
        start = measured.parents[-1].end_s


def test_a_server_is_at_rest_before_the_other_is_measured():
    first, second = VirtualServer(), VirtualServer()
    measure(workload(repeat=2), first, second, pause_s=3.0)
    # A request takes 1 s; the warm-ups come first.
    assert [[moment for moment, _ in server.requests[1:]] for server in (first, second)] == [[5.0, 13.0], [9.0, 17.0]]


def test_two_servers_take_turns_and_are_asked_the_same():
    first, second, shown = VirtualServer(), VirtualServer(), []
    second.step_s = 0.5
    results = measure(workload(n=[1, 2]), first, second, progress=lambda row, place, _: shown.append((row.n, place)))
    assert shown == [(n, place) for n in (1, 2) for _ in range(2) for place in (0, 1)]
    prompts = [[body["prompt"] for _, body in server.requests] for server in (first, second)]
    assert prompts[0] == prompts[1]
    assert {body["model"] for _, body in second.requests} == {"model 1"}
    in_order = sorted([(at, "A") for at, _ in first.requests] + [(at, "B") for at, _ in second.requests])
    assert "".join(name for _, name in in_order) == "AB" * 6
    for result in results:
        a, b = result.repetitions
        assert [r.parents[0].end_s - r.parents[0].start_s for r in a + b] == [1.0, 1.0, 2.0, 2.0]


def test_failures_are_kept_in_order_and_the_others_still_measured():
    def script(body):
        bad = len(server.requests) in (3, 4)
        yield from [{"error": {"message": f"failure {len(server.requests)}"}}] if bad else server.steps(body)

    server = VirtualServer(script)
    (result,) = measure(workload(parents=[1], requests=2), server)
    assert result.errors == ["the server reported an error: failure 3", "the server reported an error: failure 4"]
    assert [len(repetition.good) for repetition in result.repetitions[0]] == [1, 1]


def test_a_failed_warm_up_is_an_error_too():
    server = VirtualServer()
    server.status = 400
    (result,) = measure(workload(repeat=1), server)
    assert len(result.errors) == 2


def test_without_ignore_eos_tokens_are_those_of_usage():
    def script(body):
        yield from [chunk(0, "a", "stop"), chunk(1, "b", "stop")]
        yield {"choices": [], "usage": {"completion_tokens": 5}}
        yield b"data: [DONE]\n\n"

    (result,) = measure(workload(repeat=1, ignore_eos=False), VirtualServer(script))
    assert [parent.tokens for parent in result.repetitions[0][0].parents] == [5]


PAGE = """\
# HELP choral_prompt_tokens_asked_total prompt tokens of families, once per family
# TYPE choral_prompt_tokens_asked_total counter
choral_prompt_tokens_asked_total {asked}
choral_prompt_tokens_computed_total {computed}
choral_kv_blocks_used 0
"""


def test_prompt_tokens_are_counted_over_a_repetition():
    server = VirtualServer()

    def page():
        return PAGE.format(asked=100 + 10 * len(server.requests), computed=50 + len(server.requests))

    server.pages["/metrics"] = page
    (result,) = measure(workload(parents=[3]), server)
    assert [repetition.prompt_tokens for repetition in result.repetitions[0]] == [PromptTokens(30, 3)] * 2


@pytest.mark.parametrize("page", [None, "", "vllm:prompt_tokens_total 3.0\n", "choral_prompt_tokens_asked_total 3\n"])
def test_a_server_without_the_counters_has_none(page):
    server = VirtualServer()
    server.pages = {} if page is None else {"/metrics": page}
    assert run(prompt_tokens(server.client())) is None
