"""What HTTP and the cluster cost: tok/s of one request to a server over that of the engine alone, and the ratio.

    python -m tests.system.http_bench --rounds 5

A server and the engine alone, which runs in this process, take turns on a family of n children, so that both see the
same pace of the machine; the request is made once with streaming and once without. While the engine runs, all processes
of the server stand still, for idle ones take a part of a core. The client reads bytes and looks at nothing but the
count of tokens at the end.
"""

import argparse
import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from tests.engines import family
from tests.system.alone import EngineAlone, run_like_a_rank
from tests.system.conftest import Server, serve

SIZES = (1, 8, 32)
WAYS = ("streaming", "whole")
SETTLE_S = 2.0
"""For the server to do what has become due meanwhile."""


def ask(server: Server, prompt: Sequence[int], n: int, tokens: int, stream: bool) -> float:
    """Tokens per second of one request."""
    body: dict[str, Any] = {"model": server.model, "prompt": prompt, "n": n, "max_tokens": tokens, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    try:
        connection.connect()
        started = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        seconds = time.monotonic() - started
    finally:
        connection.close()
    if stream:
        *_, last, done, _ = answer.split(b"\n\n")
        assert done == b"data: [DONE]", answer[-500:]
        answer = last.removeprefix(b"data: ")
    made = json.loads(answer)["usage"]["completion_tokens"]
    assert made == n * tokens, f"{made} tokens"
    return float(made / seconds)


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """A few seconds at most, which Ray takes for a slow answer."""
    processes = server.processes()
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        time.sleep(SETTLE_S)


def a_turn(server: Server, alone: EngineAlone, n: int, args: argparse.Namespace) -> dict[str, float]:
    """Ratios of the server's tok/s each way over the engine's before and after it."""
    prompts = [[random.randrange(1000, 40000) for _ in range(args.prompt_len)] for _ in range(4)]
    queues = [[family("p", prompt, range(n), max_tokens=args.tokens, logprobs=None)] for prompt in prompts[:2]]
    with standing_still(server):
        before = alone.speed(queues[0])
    made = {way: ask(server, prompts[2 + i], n, args.tokens, way == "streaming") for i, way in enumerate(WAYS)}
    with standing_still(server):
        after = alone.speed(queues[1])
    return {way: 2 * speed / (before + after) for way, speed in made.items()}


def main() -> None:
    run_like_a_rank("tests.system.http_bench")
    parser = argparse.ArgumentParser(description="What HTTP and the cluster cost, as a ratio to the engine alone.")
    parser.add_argument("--rounds", type=int, default=5, help="turns at each n (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a child (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a server that stands still must not stay behind
    alone = EngineAlone()
    with serve() as server:
        for n in SIZES:
            a_turn(server, alone, n, args)
            made = [a_turn(server, alone, n, args) for _ in range(args.rounds)]
            for way in WAYS:
                ratios = [ratio[way] for ratio in made]
                print(f"n {n} {way}: {median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
