"""What a bench asks: the rows of its grid, the prompts of a row, and the moments at which parents arrive.

Everything is drawn from one seed by name, so that two servers are asked the same and a run can be had again. Knows
neither HTTP nor clocks. Made by the bench's command, used by its runner.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Prefix = Literal["cold", "warm"]
WARM_UP = -1
"""Number of the repetition that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of the grid: how many parents are asked, how they come, and the sampling values of each."""

    prompt_len: int
    n: int
    parents: int | None
    """Parents under way at once; None where they arrive at a rate."""
    rate: float | None
    """Parents per second, arriving as a Poisson process; None where the next waits for the one before."""
    requests: int
    """Parents in one repetition."""
    max_tokens: int
    top_p: float
    logprobs: int | None
    temperature: float
    prefix: Prefix
    """"cold": every prompt is new to the server; "warm": all are the one the warm-up has asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of each axis; every combination is a row."""

    prompt_len: Sequence[int]
    n: Sequence[int]
    parents: Sequence[int]
    rate: Sequence[float] = ()
    """When given, it takes the place of `parents`."""
    requests: int | None = None
    """Parents per repetition; None: as many as are under way at once."""
    max_tokens: Sequence[int]
    top_p: Sequence[float]
    logprobs: Sequence[int | None]
    temperature: Sequence[float]
    prefix: Sequence[Prefix]

    def rows(self) -> tuple[Row, ...]:
        """All combinations; the axes named first change slowest. Raises ValueError for a rate without requests."""
        return tuple(self._rows())

    def _rows(self) -> Iterator[Row]:
        load: list[tuple[int | None, float | None]] = [(None, rate) for rate in self.rate]
        load = load or [(parents, None) for parents in self.parents]
        axes = (self.prompt_len, self.n, load, self.max_tokens, self.top_p, self.logprobs, self.temperature)
        for length, n, (parents, rate), max_tokens, top_p, logprobs, temperature in itertools.product(*axes):
            requests = self.requests or parents
            if requests is None:
                raise ValueError("a rate needs the number of requests")
            for prefix in self.prefix:
                yield Row(
                    prompt_len=length, n=n, parents=parents, rate=rate, requests=requests, max_tokens=max_tokens,
                    top_p=top_p, logprobs=logprobs, temperature=temperature, prefix=prefix,
                )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rows, how often each is repeated, and the seed of everything random on the client's side."""

    rows: tuple[Row, ...]
    repeat: int
    seed: int
    vocab_size: int
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request body."""

    def prompt(self, number: int, repetition: int, parent: int) -> list[int]:
        """Token ids of a parent of row `number`."""
        row = self.rows[number]
        name = (number,) if row.prefix == "warm" else (number, repetition, parent)
        return self._random("prompt", *name).choices(range(self.vocab_size), k=row.prompt_len)

    def arrivals(self, number: int, repetition: int) -> list[float] | None:
        """Seconds from the start at which the parents of a repetition arrive; None where they wait for each other."""
        row = self.rows[number]
        if row.rate is None:
            return None
        source = self._random("arrivals", number, repetition)
        return list(itertools.accumulate(source.expovariate(row.rate) for _ in range(row.requests)))

    def bodies(self, number: int, repetition: int, model: str) -> list[bytes]:
        """The request bodies of a repetition; the warm-up has one."""
        count = 1 if repetition == WARM_UP else self.rows[number].requests
        return [self._body(number, self.prompt(number, repetition, parent), model) for parent in range(count)]

    def _body(self, number: int, prompt: list[int], model: str) -> bytes:
        row = self.rows[number]
        body: dict[str, Any] = {"model": model, "prompt": prompt, "n": row.n, "max_tokens": row.max_tokens}
        body |= {"temperature": row.temperature, "top_p": row.top_p}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {} if row.logprobs is None else {"logprobs": row.logprobs}
        body |= {"ignore_eos": True} if self.ignore_eos else {}
        if taken := sorted(body.keys() & self.extra.keys()):
            raise ValueError(f"the bench itself sets {', '.join(taken)}")
        return json.dumps(body | self.extra).encode()

    def _random(self, *name: object) -> random.Random:
        return random.Random(f"{self.seed}/" + "/".join(map(str, name)))
