"""Files on disk: whole or not there, gone when they expire, swept when nobody needs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.errors import ApiError, Fault
from router.file_store import BATCH_FILE_S, FileStore


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> FileStore:
    return FileStore(tmp_path / "files", 10, clock)


def test_another_store_on_the_same_folder_finds_the_file(store: FileStore, tmp_path: Path, clock: Clock) -> None:
    stored = store.upload([b"abc", b"", b"de"], "a.jsonl", None)
    again = FileStore(tmp_path / "files", 10, clock)
    assert again.get(stored.id) == stored
    assert again.content(stored.id).read_bytes() == b"abcde"
    assert (stored.bytes, stored.filename, stored.purpose) == (5, "a.jsonl", "batch")


@pytest.mark.parametrize(("chunks", "fits"), [([b"x" * 10], True), ([b"x" * 11], False), ([b"x"] * 11, False)])
def test_the_size_is_bounded_and_nothing_is_left_of_a_larger_one(
    store: FileStore, tmp_path: Path, chunks: list[bytes], fits: bool
) -> None:
    if fits:
        assert store.upload(chunks, "a", None).bytes == 10
        return
    with pytest.raises(ApiError) as error:
        store.upload(chunks, "a", None)
    assert (error.value.fault, error.value.param) == (Fault.BODY_TOO_LARGE, "file")
    assert [path.name for path in (tmp_path / "files").rglob("*")] == [".drafts"]


def test_a_source_that_breaks_leaves_nothing(store: FileStore) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        store.upload(broken(), "a", None)
    assert store.page(purpose=None, after=None, limit=10, newest_first=True) == ([], False)


def test_uploads_expire_after_their_time_and_outputs_stay(store: FileStore, clock: Clock) -> None:
    short, long = store.upload([b"a"], "a", 3600), store.upload([b"b"], "b", None)
    kept = store.keep_output(store.new_id(), [b"c" * 100], "c", None)
    assert (short.expires_at, long.expires_at) == (1_003_600, 1_000_000 + BATCH_FILE_S)
    for seconds, alive in ((3599, {short.id, long.id}), (3600, {long.id}), (BATCH_FILE_S, set())):
        clock.time = 1_000_000 + seconds
        found, _ = store.page(purpose="batch", after=None, limit=10, newest_first=True)
        assert {entry.id for entry in found} == alive
        for entry in (short, long):
            if entry.id not in alive:
                with pytest.raises(ApiError, match="does not exist"):
                    store.get(entry.id)
                with pytest.raises(ApiError, match="does not exist"):
                    store.delete(entry.id)
    assert store.get(kept.id).bytes == 100


def test_a_sweep_frees_what_expired_but_not_what_is_in_use(store: FileStore, clock: Clock) -> None:
    used, free, young = (store.upload([b"a"], "a", seconds) for seconds in (3600, 3600, 7200))
    clock.time += 3600
    store.sweep({used.id}.__contains__)
    there = {entry.id: store.content(entry.id).exists() for entry in (used, free, young)}
    assert there == {used.id: True, free.id: False, young.id: True}


def test_an_output_written_twice_is_one_file(store: FileStore) -> None:
    file_id = store.new_id()
    for content in (b"first", b"second"):
        store.keep_output(file_id, [content], "a", None)
    assert store.content(file_id).read_bytes() == b"first"
    found, _ = store.page(purpose="batch_output", after=None, limit=10, newest_first=True)
    assert [entry.id for entry in found] == [file_id]
