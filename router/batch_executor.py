"""Runs the batches of a folder behind the online requests: validates, samples, writes the files, forgets the samples.

Of several routers over one folder exactly one works on a batch, and whoever finds it unfinished goes on with it after a
restart. Batches take a bounded share of the children computed at once, and start none while online requests need the
room. The app starts and stops it; `router.batch.runner` does the sampling.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from router import batch_lines
from router.batch.rows import RowReader, RowRules
from router.batch.runner import BatchError, BatchRunner, RunOptions
from router.batch.store import SampleStore
from router.batch_lines import Tally
from router.batch_store import Batch, BatchErrors, BatchStore, Ending, InputError, RequestCounts
from router.file_store import FileStore
from router.serving import Serving

T = TypeVar("T")

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Batches under way at a time; further ones wait for their turn."""
LINES_AT_ONCE = 64
_FORM: Literal["jsonl"] = "jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds."""

    poll_s: float = 1.0
    """How often the folder is looked at: for batches of other routers, cancellation, expiry, and to save progress."""
    retry_s: float = 10.0
    """Pause after a batch could not go on."""
    sweep_s: float = 60.0
    """How often expired files are removed."""
    run: RunOptions | None = None


class BatchExecutor:
    """One per app. Everything runs on the event loop of `start`, disk work in threads."""

    def __init__(
        self,
        serving: Serving,
        files: FileStore,
        batches: BatchStore,
        *,
        now: Callable[[], float] = time.time,
        timing: Timing | None = None,
    ) -> None:
        self._serving = serving
        self._files = files
        self._batches = batches
        self._now = now
        self._timing = timing or Timing()
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._runners: dict[str, BatchRunner] = {}
        self._swept_at = 0.0

    def start(self) -> None:
        """Begin; to be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._looking = self._loop.create_task(self._look_often())

    async def stop(self) -> None:
        """Let go of all batches, their finished samples on disk; another executor goes on with them. Idempotent."""
        tasks = [task for task in (self._looking, *self._working.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Something changed in the folder; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    def metrics(self) -> str:
        """Prometheus text."""
        children = sum(runner.progress.children_alive for runner in self._runners.values())
        return (
            "# HELP choral_batches_running Batches this router works on now.\n"
            "# TYPE choral_batches_running gauge\n"
            f"choral_batches_running {len(self._working)}\n"
            "# HELP choral_batch_children Children of batches under way in this router now.\n"
            "# TYPE choral_batch_children gauge\n"
            f"choral_batch_children {children}\n"
        )

    async def _look_often(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("could not look for batches")
            await self._pause(self._timing.poll_s)

    async def _look(self) -> None:
        """Take up batches nobody works on, oldest first, and remove what has expired."""
        for batch in await asyncio.to_thread(self._batches.unfinished):
            if len(self._working) < AT_ONCE and batch.id not in self._working and self._can_take(batch):
                self._take(batch.id)
        if self._now() >= self._swept_at + self._timing.sweep_s:
            self._swept_at = self._now()
            await asyncio.to_thread(self._files.sweep, self._batches.uses)

    def _can_take(self, batch: Batch) -> bool:
        """Another model would go on with other samples; but it can end what has been sampled or will never be."""
        known = batch.fingerprint == self._serving.engine.model.fingerprint
        same = known and batch.model == self._serving.engine.model.name
        return same or batch.ending is not None or self._stopped_by(batch) is not None

    def _take(self, batch_id: str) -> None:
        if (lock := self._batches.lock(batch_id)) is not None:
            task = asyncio.get_running_loop().create_task(self._work(batch_id, lock))
            self._working[batch_id] = task
            task.add_done_callback(lambda _: self._working.pop(batch_id, None))

    async def _pause(self, seconds: float) -> None:
        """Until something changed, or so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # `wait_for` may swallow that it is cancelled
                await self._woken.wait()
            self._woken.clear()

    async def _work(self, batch_id: str, lock: IO[bytes]) -> None:
        """Bring a batch as far as it goes; what goes wrong on the way is tried again later."""
        with lock:
            try:
                batch = await self._save(await self._validated(await asyncio.to_thread(self._batches.load, batch_id)))
                batch = await self._save(await self._sampled(batch))
                if batch.ending is not None:
                    await self._save(await _in_thread(self._written, batch, batch.ending))
            except BatchError as error:
                log.warning("batch %s waits: %s", batch_id, error)
                await asyncio.sleep(self._timing.retry_s)
            except Exception:
                log.exception("batch %s could not go on", batch_id)
                await asyncio.sleep(self._timing.retry_s)
        self._woken.set()

    async def _save(self, batch: Batch) -> Batch:
        await _in_thread(self._batches.save, batch)
        return batch

    async def _validated(self, batch: Batch) -> Batch:
        """A new batch as `in_progress`, or as `failed` with what is wrong with its input."""
        if batch.status != "validating":
            return batch
        if (ending := self._stopped_by(batch)) is not None:
            return self._closing(batch, ending)
        total, errors = await asyncio.to_thread(self._checked, batch)
        if errors:
            return batch.to("failed", self._now(), errors=BatchErrors(data=tuple(errors)))
        return batch.to("in_progress", self._now(), request_counts=RequestCounts(total=total))

    def _checked(self, batch: Batch) -> tuple[int, list[InputError]]:
        try:
            return batch_lines.check(self._input(batch), self._reader(batch), self._serving.limits)
        except FileNotFoundError:
            return 0, [batch_lines.gone()]

    async def _sampled(self, batch: Batch) -> Batch:
        """A batch `in_progress` as one whose files are to be written: all is sampled, or it is to stop."""
        if batch.status != "in_progress":
            return batch
        if (ending := self._stopped_by(batch)) is not None:
            return self._closing(batch, ending)
        store = await _in_thread(self._store, batch)
        try:
            runner = BatchRunner(
                self._serving.engine,
                store,
                self._reader(batch),
                capacity=lambda: self._capacity(batch.id),
                options=self._timing.run,
            )
            self._runners[batch.id] = runner
            ending = await self._until_ending(runner.run(_lines(self._input(batch))), batch, runner)
        finally:
            self._runners.pop(batch.id, None)
            await _in_thread(store.close)
        return self._closing(batch, ending)

    async def _until_ending(self, run: Coroutine[Any, Any, Any], batch: Batch, runner: BatchRunner) -> Ending:
        """Wait for `run`, saving progress; a reason to stop cancels it."""
        task = asyncio.ensure_future(run)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=self._timing.poll_s)
                done = runner.progress
                counts = RequestCounts(
                    total=batch.request_counts.total,
                    completed=done.done_rows - done.failed_rows,
                    failed=done.failed_rows,
                )
                if counts != batch.request_counts:
                    batch = await self._save(batch.model_copy(update={"request_counts": counts}))
                if not task.done() and (ending := await asyncio.to_thread(self._stopped_by, batch)) is not None:
                    return ending
            task.result()
            return "completed"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _stopped_by(self, batch: Batch) -> Ending | None:
        if self._batches.cancel_asked(batch.id) is not None:
            return "cancelled"
        return "expired" if self._now() >= batch.expires_at else None

    def _closing(self, batch: Batch, ending: Ending) -> Batch:
        """The batch while its files are written; their ids are fixed first, so that a kill leaves none behind."""
        ids = {"output_file_id": self._files.new_id(), "error_file_id": self._files.new_id(), "ending": ending}
        asked = self._batches.cancel_asked(batch.id)
        if ending == "cancelled":
            return batch.to("cancelling", asked or self._now(), **ids)
        return batch.to("finalizing", self._now(), **ids)

    def _written(self, batch: Batch, ending: Ending) -> Batch:
        """The batch at its end, with its files on disk."""
        tally = Tally()
        output = error = None
        if batch.in_progress_at is not None:
            with closing(self._store(batch)) as store:
                good = batch_lines.answers(store.records(), batch.id, tally)
                output = self._keep(batch, batch.output_file_id, good, "output")
                inputs = batch_lines.read(self._input(batch))
                bad = batch_lines.failures(store.records(), inputs, batch.id, ending, tally)
                error = self._keep(batch, batch.error_file_id, bad, "error")
        counts = RequestCounts(total=tally.completed + tally.failed, completed=tally.completed, failed=tally.failed)
        files = {"output_file_id": output, "error_file_id": error}
        return batch.to(ending, self._now(), request_counts=counts, usage=tally.usage(), **files)

    def _keep(self, batch: Batch, file_id: str | None, lines: Iterator[bytes], kind: str) -> str | None:
        """The id of a file with these lines; None where there are none."""
        if file_id is None or (first := next(lines, None)) is None:
            return None
        name = f"{batch.id}_{kind}.jsonl"
        return self._files.keep_output(file_id, itertools.chain((first,), lines), name, batch.output_expires_s).id

    def _store(self, batch: Batch) -> SampleStore:
        job = {"batch": batch.id, "model": batch.model, "fingerprint": batch.fingerprint}
        return SampleStore.open(str(self._batches.samples(batch.id)), job, _FORM)

    def _reader(self, batch: Batch) -> RowReader:
        """Its rows are those of the HTTP routes; what a reply would draw is fixed by the batch and the custom_id."""
        rules = RowRules(key=batch.id, replies=True, strict=False, url=batch.endpoint, created=batch.created_at)
        return RowReader(self._serving, rules)

    def _input(self, batch: Batch) -> Path:
        return self._files.content(batch.input_file_id)

    def _capacity(self, batch_id: str) -> int:
        """Children this batch may have under way: an equal part of what batches may, if online requests leave it."""
        limits = self._serving.limits
        others = sum(r.in_use for other, r in self._runners.items() if other != batch_id)
        part = -(-limits.batch_children // max(len(self._runners), 1))
        left = min(limits.batch_children, limits.running_children - self._serving.admission.in_use) - others
        return max(0, min(part, left))


async def _in_thread(work: Callable[..., T], *args: Any) -> T:
    """What `work` returns. A caller that is cancelled meanwhile waits for its end: it must not outlive the lock."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _lines(path: Path) -> AsyncIterator[bytes]:
    """The input, read in a thread some lines at a time."""
    source = batch_lines.read(path)
    while lines := await asyncio.to_thread(_some, source):
        for line in lines:
            yield line


def _some(source: Iterable[bytes]) -> list[bytes]:
    return list(itertools.islice(source, LINES_AT_ONCE))
