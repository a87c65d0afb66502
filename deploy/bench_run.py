"""Runs a workload against one server or two: rows, warm-ups, repetitions, and how parents follow each other.

With two servers the repetitions alternate, so that whatever else the machine does hits both alike. Clock and sleep
come from outside. Called by the bench's command; what is measured goes to the report as it is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.bench_client import Clock, ParentTiming, ask
from deploy.bench_load import WARM_UP, Row, Workload

Ask = Callable[[bytes], Coroutine[Any, Any, ParentTiming]]
"""Sends a body and listens to the end of the answer."""
Sleep = Callable[[float], Awaitable[None]]
Progress = Callable[[Row, int, "Repetition"], None]
"""Called with the row, the number of the server and what was measured."""

_ASKED, _COMPUTED = "choral_prompt_tokens_asked_total", "choral_prompt_tokens_computed_total"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Counters of a server: prompt tokens families asked for, and those run through the model."""

    asked: int
    computed: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """What one repetition of a row brought on one server."""

    parents: list[ParentTiming]
    prompt_tokens: PromptTokens | None
    """Counted over the repetition; None where the server does not say."""
    client_cpu_s: float
    """Processor time of this process meanwhile."""

    @property
    def good(self) -> list[ParentTiming]:
        return [parent for parent in self.parents if parent.error is None]


@dataclass(frozen=True, slots=True)
class RowResult:
    """All repetitions of a row. The outer index is the server's."""

    row: Row
    warm_ups: list[ParentTiming]
    repetitions: list[list[Repetition]]

    @property
    def errors(self) -> list[str]:
        """One for every request that failed, those of earlier repetitions first."""
        turns = zip(*self.repetitions, strict=True)
        counted = [parent for turn in turns for repetition in turn for parent in repetition.parents]
        return [parent.error for parent in self.warm_ups + counted if parent.error is not None]


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test. `client` has its address as base URL."""

    client: httpx.AsyncClient
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Asks every server everything the workload has.

    Before each repetition it waits `pause_s`: a server may keep a core busy for a while after its last answer, and
    with two of them that would be the other's.
    """

    workload: Workload
    servers: Sequence[Server]
    progress: Progress
    pause_s: float = 0.0
    clock: Clock = time.perf_counter
    sleep: Sleep = asyncio.sleep

    async def run(self) -> list[RowResult]:
        """Row by row; in a row first the warm-ups, then the repetitions, the servers taking turns."""
        return [await self._row(number) for number in range(len(self.workload.rows))]

    async def _row(self, number: int) -> RowResult:
        warm_ups = [(await self._parents(server, number, WARM_UP))[0] for server in self.servers]
        result = RowResult(self.workload.rows[number], warm_ups, [[] for _ in self.servers])
        for repetition in range(self.workload.repeat):
            for place, server in enumerate(self.servers):
                await self.sleep(self.pause_s)
                measured = await self._repetition(server, number, repetition)
                result.repetitions[place].append(measured)
                self.progress(result.row, place, measured)
        return result

    async def _repetition(self, server: Server, number: int, repetition: int) -> Repetition:
        before, cpu_s = await prompt_tokens(server.client), time.process_time()
        parents = await self._parents(server, number, repetition)
        cpu_s = time.process_time() - cpu_s
        after = await prompt_tokens(server.client)
        if before is None or after is None:
            return Repetition(parents, None, cpu_s)
        counted = PromptTokens(after.asked - before.asked, after.computed - before.computed)
        return Repetition(parents, counted, cpu_s)

    async def _parents(self, server: Server, number: int, repetition: int) -> list[ParentTiming]:
        row = self.workload.rows[number]
        expected = row.n * row.max_tokens if self.workload.ignore_eos else None
        bodies = self.workload.bodies(number, repetition, server.model)
        arrivals = self.workload.arrivals(number, repetition)

        async def one(body: bytes) -> ParentTiming:
            return await ask(server.client, body, row.n, expected, self.clock)

        if arrivals is None or repetition == WARM_UP:
            return await closed_loop(bodies, row.parents or 1, one)
        return await open_loop(bodies, arrivals, one, self.clock, self.sleep)


async def closed_loop(bodies: Sequence[bytes], parents: int, one: Ask) -> list[ParentTiming]:
    """Keep `parents` requests under way until all are answered; results in the order of `bodies`."""
    results: dict[int, ParentTiming] = {}
    waiting = iter(enumerate(bodies))

    async def ask_in_turn() -> None:
        for place, body in waiting:
            results[place] = await one(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(parents, len(bodies))):
            group.create_task(ask_in_turn())
    return [results[place] for place in range(len(bodies))]


async def open_loop(
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    one: Ask,
    clock: Clock,
    sleep: Sleep,
) -> list[ParentTiming]:
    """Send each request at its moment, whatever became of those before it; results in the order of `bodies`."""

    start = clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, arrival in zip(bodies, arrivals, strict=True):
            await sleep(max(0.0, start + arrival - clock()))
            tasks.append(group.create_task(one(body)))
    return [task.result() for task in tasks]


async def prompt_tokens(client: httpx.AsyncClient) -> PromptTokens | None:
    """Choral's counters from its metrics page; None where there are none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return None
    values = dict(line.split(" ", 1) for line in response.text.splitlines() if line.startswith("choral_"))
    if response.status_code != 200 or not {_ASKED, _COMPUTED} <= values.keys():
        return None
    return PromptTokens(int(values[_ASKED]), int(values[_COMPUTED]))
