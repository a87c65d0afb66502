"""Clusters of other shapes answer with the same bits as one group of one rank; what cannot be placed says why."""

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
import torch
from ray.util.state import list_actors
from ray.util.state.common import ActorState

from cluster.config import ClusterConfig
from deploy.app import RunningCluster, StartError, start
from tests.system.conftest import ready_url, serve, serve_process
from tests.system.requests import choices, complete, stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

REQUESTS = [{"n": 8, "logprobs": 2, "seed": seed, "top_p": top_p} for seed, top_p in ((1, 1.0), (2, 0.8), (3, 1.0))]


@pytest.fixture(scope="module")
def expected(embedded_model: Path):
    """The answers of one group of one rank, which then stops."""
    with serve() as server:
        return [choices(complete(server.url, **request)) for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        ("--groups", "2"),
        ("--tp", "2", "--no-prefix-cache", "--max-step-tokens", "7"),
        ("--max-running", "3", "--kv-blocks", "9", "--max-model-len", "128"),
    ],
    ids=["two groups", "two ranks", "waves and preemption"],
)
def test_c2_another_run_of_another_shape_gives_the_same_bits(expected, options: tuple[str, ...]):
    with serve(*options) as other:
        assert [choices(complete(other.url, **request)) for request in REQUESTS] == expected
        other.wait_until_idle(5)


def test_prompts_of_one_request_go_to_several_groups(embedded_model: Path):
    prompts = ["The sea is", "A good friend is", "In the morning"]
    with serve("--groups", "2") as other:
        first, *others = [
            choices(complete(other.url, prompt=prompts, n=2, logprobs=0, max_tokens=4)) for _ in range(12)
        ]
        assert len(first) == 6 and all(again == first for again in others)
        other.wait_until_idle(5)


def test_an_interrupt_lets_running_requests_finish_and_refuses_new_ones(embedded_model: Path):
    with serve() as server:
        events = stream(server.url, n=2, max_tokens=300, ignore_eos=True)
        finishes = [c["finish_reason"] for c in next(events)["choices"]]
        server.process.send_signal(signal.SIGINT)
        time.sleep(1)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"})
        finishes += [c["finish_reason"] for event in events for c in event["choices"]]
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert [reason for reason in finishes if reason] == ["length", "length"]
        assert server.process.wait(60) == 0


def test_a_family_of_64_in_waves_with_memory_for_five(embedded_model: Path):
    with serve("--max-running", "8", "--kv-blocks", "12", "--max-model-len", "96") as other:
        reply = complete(other.url, n=64, max_tokens=50, ignore_eos=True)
        assert [c["index"] for c in reply["choices"]] == list(range(64))
        assert reply["usage"]["completion_tokens"] == 64 * 50
        assert other.wait_until_idle(5)["choral_preemptions_total"] > 0


def test_a_second_interrupt_ends_running_requests_and_leaves_nothing(embedded_model: Path):
    with serve_process() as (process, _):
        url = ready_url(process)
        events = stream(url, n=2, max_tokens=2000, ignore_eos=True)
        next(events)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            assert any("error" in event for event in events)
        assert process.wait(60) != 0


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 4.0])
def test_signals_while_ray_starts_end_the_start_and_leave_nothing(embedded_model: Path, wait_s: float):
    with serve_process() as (process, _):
        assert process.stdout is not None
        assert any(line.startswith("starting Ray") for line in process.stdout)
        time.sleep(wait_s)
        process.terminate()
        time.sleep(0.3)
        process.terminate()
        assert process.wait(60) == 130
        assert process.stdout.read().endswith("choral: interrupted\n")


TERMINATED_INSIDE_RAY = """
import os, signal, sys
import ray._raylet
from deploy.cli import main

class CoreWorker(ray._raylet.CoreWorker):
    def __init__(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

ray._raylet.CoreWorker = CoreWorker
sys.exit(main())
"""
"""The signal comes when Ray's native code has just put in its own handler, which would end the process."""


def test_a_signal_that_ray_itself_would_hear_ends_the_start_as_any_other(embedded_model: Path):
    with serve_process(program=("-c", TERMINATED_INSIDE_RAY)) as (process, _):
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(60) == 130
        assert output.endswith("starting Ray\nchoral: interrupted\n")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ClusterConfig(tp=5), "tp must be from 1 to 3"),
        (ClusterConfig(model="/nowhere"), "/nowhere"),
        (ClusterConfig(max_model_len=10**6), "max_model_len"),
        (ClusterConfig(address="127.0.0.1:9", port=0), "127.0.0.1:9"),
        pytest.param(
            ClusterConfig(device="cuda"),
            "no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_no_group_can_load_is_said_before_ray_starts(embedded_model: Path, config: ClusterConfig, words: str):
    with pytest.raises(StartError, match=words):
        start(config)
    assert not ray.is_initialized()


def test_a_port_that_is_taken_is_named(embedded_model: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
            start(ClusterConfig(port=port))


@pytest.fixture(scope="module")
def three_ranks(embedded_model: Path) -> Iterator[RunningCluster]:
    """A cluster of this process's own, which leaves nothing of Ray behind."""
    with start(ClusterConfig(tp=3, port=0)) as running:
        yield running
    assert not ray.is_initialized()


def alive() -> list[ActorState]:
    return [a for a in list_actors(address=ray.get_runtime_context().gcs_address) if a.state == "ALIVE"]


def test_the_actors_of_a_cluster_are_the_ranks_the_aggregator_and_the_replicas(three_ranks: RunningCluster):
    assert len(complete(three_ranks.url, n=3)["choices"]) == 3
    names = [actor.class_name for actor in alive()]
    assert names.count("RankWorker") == 2 and names.count("AggregatorActor") == 1
    assert sum(name.startswith("ServeReplica:choral:groups") for name in names) == 1
    assert sum(name.startswith("ServeReplica:choral:router") for name in names) == 1


def test_a_group_that_serve_ends_delivers_its_children_to_the_last_token(three_ranks: RunningCluster):
    events = stream(three_ranks.url, n=2, max_tokens=100, ignore_eos=True)
    seen = [next(events)]
    (group,) = [actor for actor in alive() if actor.class_name.startswith("ServeReplica:choral:groups")]
    ending = ray.get_actor(group.name, "serve").perform_graceful_shutdown.remote()
    seen += events
    assert [c["finish_reason"] for event in seen for c in event["choices"] if c["finish_reason"]] == ["length"] * 2
    ray.get(ending, timeout=60)
