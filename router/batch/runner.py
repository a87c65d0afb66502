"""Runs a batch: rows come in, every sample that is not in the store yet is asked of the engine, and goes there.

It keeps the engine full up to a window of sequences, retries what is lost with a group or an aggregator, and gives a
row up only when it failed alone. Rows never stop each other. The driver of the `choral batch` job and the HTTP batches
call it; it knows neither Ray nor where rows come from. Cancelling `run` frees everything; samples already finished
are flushed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

from aggregation.parent_request import ParentRequest
from aggregation.results import ChoiceDelta
from router.batch import records
from router.batch.backlog import Backlog
from router.batch.rows import Raw, Row, RowReader
from router.batch.store import SampleStore
from router.batch.window import Window
from router.engine import Engine, GenerationError, NoHealthyGroupError
from router.errors import ApiError, Fault, clip

ALONE = 1 << 40
"""A weight beside which nothing fits into a window."""


class BatchError(Exception):
    """The batch cannot go on now; what is finished is kept, and the same batch may be run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a batch is run; nothing here changes what it writes."""

    look_ahead: int = 256
    """Rows tokenised in advance; the longest of them goes first."""
    attempts: int = 3
    """After so many attempts in a row that brought no sample, a row is tried with nothing beside it, so that no row
    is given up for what another one did."""
    attempts_alone: int = 2
    """After so many further ones it is given up."""
    backoff_s: float = 0.5
    """Wait before another attempt; it doubles with every one in a row that brought nothing."""
    patience_s: float = 600.0
    """How long the engine may be without a group before the batch fails."""
    flush_s: float = 3.0
    """Finished samples are on disk after so long."""


@dataclass(slots=True)
class Progress:
    """Numbers of this run, for bars, logs and metrics."""

    read_rows: int = 0
    """Rows taken from the input."""
    done_rows: int = 0
    """Complete rows, those of earlier runs included."""
    failed_rows: int = 0
    """Of those, how many have an error."""
    samples: int = 0
    """Samples in the output, those of earlier runs included."""
    new_samples: int = 0
    tokens: int = 0
    """Generated in this run."""
    children_alive: int = 0
    retries: int = 0
    seconds: float = 0.0
    tail_s: float = 0.0
    """From the moment the queue ran dry, when no row was left to start, to the end."""


class BatchRunner:
    """`capacity` says how many sequences may be under way now, `pieces` over how many groups a late family is split."""

    def __init__(
        self,
        engine: Engine,
        store: SampleStore,
        reader: RowReader,
        *,
        capacity: Callable[[], int],
        pieces: Callable[[], int] = lambda: 1,
        options: RunOptions | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._reader = reader
        self._pieces = pieces
        self._options = options or RunOptions()
        self._window = Window(capacity)
        self._backlog = Backlog(self._options.look_ahead)
        self._started = time.monotonic()
        self._dry_at: float | None = None
        self._progress = Progress()

    @property
    def progress(self) -> Progress:
        """The numbers as of now."""
        done, now = self._store.done, time.monotonic()
        tail_s = now - self._dry_at if self._dry_at is not None else 0.0
        return replace(
            self._progress,
            done_rows=done.rows,
            failed_rows=done.failed_rows,
            samples=done.samples,
            seconds=now - self._started,
            tail_s=tail_s,
        )

    @property
    def in_use(self) -> int:
        """Sequences that room is held for, whether they run or wait for another attempt."""
        return self._window.in_use

    async def run(self, rows: AsyncIterator[Raw]) -> Mapping[str, Any]:
        """Sample all rows; returns the summary, which is in the store by then. A job that has ended is not run again.

        Raises BatchError, and whatever reading `rows` raises. However it ends, finished samples are flushed.
        """
        if self._store.summary is not None:
            return self._store.summary
        try:
            async with asyncio.TaskGroup() as group:
                ticking = [group.create_task(self._flush_often()), group.create_task(self._refresh_often())]
                group.create_task(self._fill(rows))
                async with asyncio.TaskGroup() as families:
                    await self._start_all(families)
                for task in ticking:
                    task.cancel()
        except BaseExceptionGroup as error:
            raise _first(error) from error
        finally:
            await asyncio.shield(asyncio.to_thread(self._store.flush))
        summary = asdict(self.progress)
        await asyncio.to_thread(self._store.finish, summary)
        return summary

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(self._options.flush_s)
            await asyncio.to_thread(self._store.flush)

    async def _refresh_often(self) -> None:
        """The window's size may change at any time."""
        while True:
            await asyncio.sleep(0.2)
            self._window.refresh()

    async def _fill(self, rows: AsyncIterator[Raw]) -> None:
        """Make plans of the rows that are not complete; the bad ones are written down at once."""
        number = 0
        async for raw in rows:
            row_id, fields = self._reader.identify(number, raw)
            self._progress.read_rows += 1
            if not self._store.done.complete(number):
                await self._prepare(number, row_id, fields)
            number += 1
            if number % 64 == 0:
                await asyncio.sleep(0)  # neither bad rows nor complete ones wait for anything
        await self._backlog.close()
        self._note_dry()

    async def _prepare(self, number: int, row_id: str, fields: Mapping[str, Any] | ApiError) -> None:
        try:
            if isinstance(fields, ApiError):
                raise fields
            row = await self._reader.read(number, row_id, fields)
        except ApiError as error:
            self._store.add(records.refused(number, row_id, error, self._engine.model.fingerprint))
            return
        await self._backlog.put(row)

    async def _start_all(self, families: asyncio.TaskGroup) -> None:
        """Start rows, or parts of large ones, whenever the window has room."""
        while (row := await self._backlog.get()) is not None:
            for part in _split(self._missing(row), self._parts(row)):
                await self._window.acquire(len(part))
                families.create_task(self._sample(row, part))
            self._note_dry()

    def _parts(self, row: Row) -> int:
        """Siblings stay together, unless they would fill half the window, or groups would be idle without them."""
        if len(row.parent.prompts) > 1:
            return 1
        large = -(-row.parent.num_children // max(self._window.capacity() // 2, 1))
        late = self._pieces() // (len(self._backlog) + 1) if self._backlog.closed else 1
        return max(large, late)

    def _note_dry(self) -> None:
        if self._backlog.closed and not len(self._backlog) and self._dry_at is None:
            self._dry_at = time.monotonic()

    async def _sample(self, row: Row, indices: list[int]) -> None:
        """Samples of a row, for which there is room in the window, until all are in the store or given up."""
        options = self._options
        try:
            failure = await self._try(row, indices, options.attempts)
        finally:
            self._window.release(len(indices))
        if failure is not None:
            async with self._window.hold(ALONE):
                failure = await self._try(row, indices, options.attempts_alone)
        if failure is not None:
            self._give_up(row, self._missing(row, indices), failure)

    def _give_up(self, row: Row, indices: list[int], failure: str) -> None:
        error = ApiError(Fault.GENERATION_FAILED, f"given up after many attempts, the last ones alone: {clip(failure)}")
        for index in indices:
            self._store.add(records.failed(row, index, error, self._engine.model.fingerprint))

    def _missing(self, row: Row, of: Sequence[int] | None = None) -> list[int]:
        missing = self._store.done.missing(row.number, row.parent.num_children)
        return missing if of is None else sorted({*missing} & {*of})

    async def _try(self, row: Row, indices: list[int], most: int) -> str | None:
        """Ask until all is there, or `most` times in a row brought nothing: then what went wrong."""
        failure, fruitless = None, 0
        while fruitless < most and (left := self._missing(row, indices)):
            if failure is not None:
                self._progress.retries += 1
                await asyncio.sleep(self._options.backoff_s * 2**fruitless)
            failure = await self._ask(row, left)
            fruitless = fruitless + 1 if self._missing(row, indices) == left else 0
        return failure

    async def _ask(self, row: Row, wanted: list[int]) -> str | None:
        """One attempt; None when all is there then, else what went wrong. Having no group is not an attempt."""
        while True:
            await self._await_engine()
            self._progress.children_alive += len(wanted)
            try:
                return await self._generate(row, wanted)
            except GenerationError as error:
                return str(error)
            except NoHealthyGroupError:
                await asyncio.sleep(self._options.backoff_s)
            finally:
                self._progress.children_alive -= len(self._missing(row, wanted))

    async def _await_engine(self) -> None:
        deadline = time.monotonic() + self._options.patience_s
        while not await self._engine.healthy():
            if time.monotonic() > deadline:
                raise BatchError(f"no group was there for {self._options.patience_s:.0f} s")
            await asyncio.sleep(self._options.backoff_s)

    async def _generate(self, row: Row, wanted: list[int]) -> str | None:
        """Samples of a row as one parent. Raises NoHealthyGroupError, GenerationError."""
        parent, index_of = _parent(row.parent, wanted)
        failure = None
        async with aclosing(_updates(self._engine, parent)) as choices:
            async for choice in choices:
                index = index_of[choice.index]
                if choice.error is not None or choice.finish_reason in ("error", "abort"):
                    failure = choice.error or "a sample was cancelled"
                elif index in wanted:
                    self._keep(row, replace(choice, index=index))
        unseen = self._missing(row, wanted)
        return failure or (f"the engine left out {len(unseen)} samples" if unseen else None)

    def _keep(self, row: Row, choice: ChoiceDelta) -> None:
        self._store.add(records.success(row, choice, self._engine.model.fingerprint))
        self._progress.new_samples += 1
        self._progress.tokens += choice.completion_tokens
        self._progress.children_alive -= 1


async def _updates(engine: Engine, parent: ParentRequest) -> AsyncGenerator[ChoiceDelta, None]:
    updates: Any = engine.stream(parent, whole=True)
    async with aclosing(updates):
        async for update in updates:
            for choice in update.deltas:
                yield choice


def _parent(whole: ParentRequest, wanted: Sequence[int]) -> tuple[ParentRequest, Sequence[int]]:
    """A parent that has the samples wanted, and the row's choice index of each of its own.

    With one prompt it has those alone. With several it has all, for they are a grid of prompts and sample numbers.
    """
    parent_id = uuid4().hex
    if len(whole.prompts) > 1:
        return replace(whole, parent_id=parent_id), range(whole.num_children)
    return replace(whole, parent_id=parent_id, samples=tuple(whole.samples[index] for index in wanted)), wanted


def _split(indices: list[int], pieces: int) -> list[list[int]]:
    """Neighbours stay together, and the pieces are about equal."""
    pieces = max(1, min(pieces, len(indices)))
    size = -(-len(indices) // pieces)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made a task group end."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
