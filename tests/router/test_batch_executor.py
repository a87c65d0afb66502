"""Batches go on after any end of the app, on one router at a time, behind online requests, and expire."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from router.batch_executor import AT_ONCE
from router.batch_store import BatchStore
from router.engine import ModelInfo, NoHealthyGroupError
from tests.router.batch_site import Site, ended, line, read, submit
from tests.router.conftest import wait_for
from tests.router.toy_engine import ToyEngine

LINES = [line(f"r{i}", n=1 + i % 5, max_tokens=1 + i % 7) for i in range(40)] + [line("bad", temperature=9)]


def outcome(api: openai.OpenAI, batch: Batch) -> tuple[Any, ...]:
    """All that a batch has brought about: equal for batches that ran the same."""
    files = [sorted(read(api, file_id).items()) for file_id in (batch.output_file_id, batch.error_file_id)]
    return batch.status, batch.request_counts, batch.usage, json.dumps(files)


def undisturbed(site: Site, batch: Batch, copy: Path) -> tuple[Any, ...]:
    """The outcome of the same batch run in one go, on a copy of the folder as it was when the batch was made."""
    quiet = Site(copy, ToyEngine(site.engine.folder))
    with quiet.open() as api:
        return outcome(api, ended(api, batch))


def made(site: Site, tmp_path: Path, lines: list[Any]) -> Batch:
    """A batch nobody works on yet; `tmp_path / "copy"` is a copy of the folder."""
    with site.open(running=False) as api:
        batch = submit(api, lines)
    shutil.copytree(site.folder, tmp_path / "copy")
    return batch


def test_c2_a_batch_that_was_stopped_again_and_again_ends_as_one_that_was_not(site: Site, tmp_path: Path) -> None:
    batch = made(site, tmp_path, LINES)
    site.engine.step_s = 0.01
    site.limits = type(site.limits)(batch_children=9)
    asked = 0
    for done in (1, 8, 15, 30):
        with site.open() as api:
            wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed >= done, 20)  # noqa: B023
            asked = len(site.engine.parents)
        wait_for(lambda: site.engine.running == 0)
        with site.open(running=False) as api:
            assert api.batches.retrieve(batch.id).status == "in_progress"
    with site.open() as api:
        result = outcome(api, ended(api, batch))
    assert len(site.engine.parents) - asked < len(LINES), "what was finished is not asked for again"
    assert result == undisturbed(site, batch, tmp_path / "copy")
    assert not BatchStore(site.folder / "batches").samples(batch.id).exists()


@contextmanager
def process(site: Site, step_s: float) -> Iterator[subprocess.Popen[str]]:
    """Something else that runs the batches of the folder; killed at the end."""
    command = [sys.executable, "-m", "tests.router.batch_process", str(site.folder), str(site.engine.folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen([*command, str(step_s)], stdout=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "started\n"
            yield child
        finally:
            child.kill()


def test_c2_a_batch_whose_process_is_killed_ends_as_one_that_was_not(site: Site, tmp_path: Path) -> None:
    batch = made(site, tmp_path, LINES)
    moments = random.Random(5)
    store = BatchStore(site.folder / "batches")
    for _ in range(4):
        with process(site, 0.03):
            time.sleep(moments.uniform(0.0, 0.5))
    assert not store.load(batch.id).ended, "the kills came too late to show anything"
    with process(site, 0.0) as last:
        assert last.wait(30) == 0
    with site.open(running=False) as api:
        result = outcome(api, api.batches.retrieve(batch.id))
        assert len(api.files.list(purpose="batch_output").data) == 2
    assert result == undisturbed(site, batch, tmp_path / "copy")


@pytest.mark.parametrize("after", ["output", "error", "description"])
def test_a_kill_while_the_files_are_written_leaves_neither_two_nor_none(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The files of an ended batch are there once, whichever of them were there when it was killed."""
    batch = made(site, tmp_path, LINES)
    broken = [True]
    keep, save = site_methods(monkeypatch)

    def failing_keep(*args: Any) -> Any:
        result = keep(*args)
        if broken[0] and args[-1] == after:
            raise SystemError("killed")
        return result

    def failing_save(store: BatchStore, saved: Any) -> None:
        if broken[0] and after == "description" and saved.ended:
            raise SystemError("killed")
        save(store, saved)

    monkeypatch.setattr("router.batch_executor.BatchExecutor._keep", failing_keep)
    monkeypatch.setattr("router.batch_store.BatchStore.save", failing_save)
    with site.open() as api:
        wait_for(lambda: api.batches.retrieve(batch.id).status == "finalizing", 20)
        wait_for(lambda: len(api.files.list(purpose="batch_output").data) == (1 if after == "output" else 2))
    broken[0] = False
    with site.open() as api:
        result = outcome(api, ended(api, batch))
        assert len(api.files.list(purpose="batch_output").data) == 2
    assert result == undisturbed(site, batch, tmp_path / "copy")


def site_methods(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    from router.batch_executor import BatchExecutor

    return BatchExecutor._keep, BatchStore.save


def test_of_several_routers_one_runs_a_batch(site: Site) -> None:
    """Every sample is asked for once, by one router; when it stops another goes on."""
    others = [Site(site.folder, ToyEngine(site.engine.folder, step_s=0.02)) for _ in range(3)]
    with ExitStack() as stack:
        apis = [stack.enter_context(other.open()) for other in others]
        batch = submit(apis[0], [line(f"r{i}", ignore_eos=True) for i in range(100)])
        wait_for(lambda: apis[1].batches.retrieve(batch.id).request_counts.completed > 10, 20)
        (worker,) = [i for i, other in enumerate(others) if other.engine.parents]
        running = len(others[worker].engine.parents)
        others[worker].http.portal.call(others[worker].executor.stop)  # type: ignore[union-attr]
        assert others[worker].engine.running == 0
        batch = ended(apis[worker - 1], batch)
        assert batch.status == "completed"
        assert len(read(apis[worker], batch.output_file_id)) == 100
        assert len([other for other in others if other.engine.parents]) == 2
        assert sum(len(other.engine.parents) for other in others) < 100 + running


def test_a_batch_waits_for_its_own_model(site: Site) -> None:
    """Another model would give other samples; it may only end what will not be run."""

    class Other(ToyEngine):
        @property
        def model(self) -> ModelInfo:
            return ModelInfo("other", str(self.folder), 400, 300, True, 0)

    with site.open(running=False) as api:
        kept, dropped = submit(api, [line("a")]), submit(api, [line("a")])
    other = Site(site.folder, Other(site.engine.folder))
    with other.open() as api:
        own = submit(api, [line("a", model="other")])
        api.batches.cancel(dropped.id)
        assert ended(api, own).status == "completed"
        assert ended(api, dropped).status == "cancelled"
        assert api.batches.retrieve(kept.id).status == "validating"
    with site.open() as api:
        assert ended(api, kept).status == "completed"


def test_a_batch_expires_with_what_it_has(site: Site) -> None:
    site.engine.step_s = 0.02
    with site.open() as api:
        batch = submit(api, [line("quick", max_tokens=1), line("slow", ignore_eos=True, max_tokens=350)])
        wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
        site.ahead = 86_401
        batch = ended(api, batch)
        assert batch.status == "expired" and batch.expired_at is not None
        assert read(api, batch.output_file_id).keys() == {"quick"}
        (entry,) = read(api, batch.error_file_id).values()
        assert (entry["custom_id"], entry["response"], entry["error"]["code"]) == ("slow", None, "batch_expired")


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_a_batch_that_never_began_ends_without_files(site: Site, ending: str) -> None:
    with site.open(running=False) as api:
        batch = submit(api, [line("a")])
        if ending == "cancelled":
            api.batches.cancel(batch.id)
        else:
            site.ahead = 86_401
    with site.open() as api:
        batch = ended(api, batch)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == (ending, None, None)
    assert site.engine.parents == []


def test_an_input_that_expires_meanwhile_is_kept_until_the_batch_has_ended(site: Site) -> None:
    site.engine.step_s = 0.02
    with site.open() as api:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        entries = [line(str(i), max_tokens=1 + i % 5, ignore_eos=True) for i in range(300)]
        content = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        file = api.files.create(file=("a", content), purpose="batch", expires_after=after)
        fields: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = api.batches.create(input_file_id=file.id, **fields)
        wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed > 10, 20)  # type: ignore[union-attr]
        site.ahead = 3601
        batch = ended(api, batch)
        assert len(read(api, batch.output_file_id)) == 300
        wait_for(lambda: not (site.folder / "files" / file.id).exists())


def children(engine: ToyEngine) -> int:
    """Children inside the engine now, if each parent there has one."""
    return engine.running


def test_batches_take_their_share_and_no_more(site: Site) -> None:
    site.engine.step_s = 0.01
    site.limits = type(site.limits)(running_children=20, batch_children=6)
    most = 0
    with site.open() as api:
        batches = [submit(api, [line(str(i), ignore_eos=True) for i in range(40)]) for _ in range(AT_ONCE + 1)]

        def done() -> bool:
            nonlocal most
            most = max(most, children(site.engine))
            return all(api.batches.retrieve(batch.id).status == "completed" for batch in batches)

        wait_for(done, 30)
    assert most == 6


def test_a_family_larger_than_the_share_runs_in_parts(site: Site) -> None:
    site.limits = type(site.limits)(running_children=20, batch_children=6)
    with site.open() as api:
        (entry,) = read(api, ended(api, submit(api, [line("a", n=30)])).output_file_id).values()
        reply = entry["response"]["body"]
        assert [choice["index"] for choice in reply["choices"]] == list(range(30))
        again = site.http.post("/v1/completions", json={**line("a", n=30)["body"], "seed": reply["seed"]}).json()
    assert again["choices"] == reply["choices"]
    assert max(parent.num_children for parent in site.engine.parents[:-1]) <= 6


def test_batches_start_nothing_while_online_requests_need_the_room(site: Site) -> None:
    site.engine.step_s = 0.01
    site.limits = type(site.limits)(running_children=20, batch_children=10)
    with site.open() as api:
        admission = site.executor._serving.admission
        with admission.reserve(20):
            batch = submit(api, [line(str(i)) for i in range(30)])
            wait_for(lambda: api.batches.retrieve(batch.id).status == "in_progress")
            wait_for(lambda: batch.id in site.executor._runners)
            wait_for(lambda: site.executor._runners[batch.id].progress.read_rows == 30)
            time.sleep(0.5)
            assert site.engine.parents == []
        with admission.reserve(17):
            wait_for(lambda: len(site.engine.parents) > 5)
            assert children(site.engine) <= 3
        assert ended(api, batch).status == "completed"


def test_online_requests_are_not_refused_because_of_batches(site: Site) -> None:
    site.engine.step_s = 0.01
    site.limits = type(site.limits)(max_children=10, max_n=10, running_children=200, batch_children=100)
    with site.open() as api:
        batch = submit(api, [line(str(i), n=10, ignore_eos=True) for i in range(30)])
        wait_for(lambda: site.engine.running == 10)
        assert site.http.post("/v1/completions", json={"prompt": "x", "n": 10, "max_tokens": 1}).status_code == 200
        assert ended(api, batch).status == "completed"


def test_batches_wait_for_a_group_and_count_in_the_metrics(site: Site) -> None:
    site.engine.up = False
    site.engine.start_error = NoHealthyGroupError("starting")
    with site.open() as api:
        batch = submit(api, [line("a")])
        wait_for(lambda: "choral_batches_running 1\n" in site.http.get("/metrics").text)
        site.engine.up, site.engine.start_error = True, None
        assert ended(api, batch).status == "completed"
        wait_for(lambda: "choral_batches_running 0\n" in site.http.get("/metrics").text)
        assert "choral_batch_children 0\n" in site.http.get("/metrics").text


def test_trouble_with_one_batch_is_tried_again_and_stops_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with site.open(running=False) as api:
        bad, good = submit(api, [line("a")]), submit(api, [line("a")])
    trouble = [OSError("no space left")] * 2
    samples = BatchStore.samples

    def full(store: BatchStore, batch_id: str) -> Path:
        if batch_id == bad.id and trouble:
            raise trouble.pop()
        return samples(store, batch_id)

    monkeypatch.setattr(BatchStore, "samples", full)
    with site.open() as api:
        assert ended(api, good).status == "completed"
        assert ended(api, bad).status == "completed"
    assert trouble == [] and caplog.text.count("could not go on") == 2


def test_stopping_twice_and_before_the_start_is_harmless(site: Site) -> None:
    with site.open(running=False):
        for _ in range(2):
            asyncio.run(site.executor.stop())


@pytest.mark.parametrize("turns", range(6))
def test_it_stops_though_it_is_woken_at_the_same_moment(site: Site, turns: int) -> None:
    """After some of these numbers of turns of the event loop a cancellation may get lost."""
    with site.open(running=False):

        async def woken_and_stopped() -> None:
            site.executor.start()
            await asyncio.sleep(0.05)  # the folder is empty: it waits
            site.executor.wake()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await site.executor.stop()

        asyncio.run(woken_and_stopped())
