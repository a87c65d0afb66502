"""The folder of a batch: what has its final name is whole, what is there is known, another job is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from router.batch.records import COLUMNS, Sample
from router.batch.store import Done, SampleStore, StoreError

JOB = {"input": "abc", "n": 4, "stop": ("a",)}


def sample(row: int, index: int, row_samples: int = 4, **values) -> Sample:
    return Sample(id=f"r{row}", row=row, index=index, row_samples=row_samples, model_fingerprint="m", **values)


def filled(folder: Path, form: str) -> SampleStore:
    store = SampleStore.open(str(folder), JOB, form)
    for index in (0, 2):
        store.add(sample(5, index, text="tëxt\u2028", token_ids=[1, 2], logprobs=[-0.1, -1e-9], seed=-(2**63)))
    store.flush()
    store.add(sample(6, 0, 1, error={"type": "t", "code": "c", "param": "n", "message": "m", "status": 400}))
    return store


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_what_was_flushed_is_read_back_and_what_was_not_is_asked_again(tmp_path: Path, form: str):
    first = filled(tmp_path, form)
    first._lock_file.close()  # as a kill does
    again = SampleStore.open(str(tmp_path), JOB, form)
    assert again.done.missing(5, 4) == [1, 3] and again.done.missing(6, 1) == [0]
    again.add(sample(5, 1))
    again.close()
    last = SampleStore.open(str(tmp_path), JOB, form)
    assert last.done.missing(5, 4) == [3]
    records = list(last.records())
    assert [tuple(record) for record in records] == [COLUMNS] * 3
    assert records[0]["text"] == "tëxt\u2028" and records[0]["logprobs"] == [-0.1, -1e-9]
    assert records[0]["seed"] == -(2**63)


def test_a_folder_of_parquet_is_one_table(tmp_path: Path):
    filled(tmp_path, "parquet").close()
    table = pq.read_table(tmp_path).sort_by([("row", "ascending"), ("index", "ascending")])
    assert table["index"].to_pylist() == [0, 2, 0]
    assert table["error"].to_pylist()[2]["param"] == "n"


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_files_that_a_kill_left_half_written_do_not_count(tmp_path: Path, form: str):
    filled(tmp_path, form).close()
    (tmp_path / f"_part-00000002.{form}.tmp").write_bytes(b"half a sh")
    again = SampleStore.open(str(tmp_path), JOB, form)
    assert again.done.samples == 2
    again.add(sample(7, 0))
    again.close()
    assert len(list(again.records())) == 4


def test_a_failed_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = filled(tmp_path, "jsonl")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(OSError, match="no space"):
            store.flush()
    assert len(list(store.records())) == 2
    store.close()
    assert len(list(store.records())) == 3


@pytest.mark.parametrize("change", [{"n": 5}, {"input": "abd"}, {"stop": ("b",)}, {"more": 1}])
def test_another_job_is_refused_by_name_unless_forced(tmp_path: Path, change: dict):
    filled(tmp_path, "jsonl").close()
    with pytest.raises(StoreError, match=rf"{next(iter(change))} changed"):
        SampleStore.open(str(tmp_path), {**JOB, **change}, "jsonl")
    store = SampleStore.open(str(tmp_path), {**JOB, **change}, "jsonl", force=True)
    assert store.done.samples == 0 and not list(store.records())


def test_another_format_is_another_job(tmp_path: Path):
    filled(tmp_path, "jsonl").close()
    with pytest.raises(StoreError, match="format changed"):
        SampleStore.open(str(tmp_path), JOB, "parquet")


def test_shards_without_a_manifest_are_not_touched(tmp_path: Path):
    (tmp_path / "part-00000000.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="no _manifest"):
        SampleStore.open(str(tmp_path), JOB, "jsonl")


def test_one_process_at_a_time(tmp_path: Path):
    script = (
        "import sys; from router.batch.store import SampleStore\n"
        f"store = SampleStore.open({str(tmp_path)!r}, {{}}, 'jsonl'); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match="another process"):
            SampleStore.open(str(tmp_path), {}, "jsonl")
        other.kill()
    SampleStore.open(str(tmp_path), {}, "jsonl").close()


def test_a_sample_is_never_taken_twice(tmp_path: Path):
    store = filled(tmp_path, "jsonl")
    with pytest.raises(ValueError, match="sample 2 of row 5"):
        store.add(sample(5, 2))


def test_the_end_is_noted(tmp_path: Path):
    store = filled(tmp_path, "parquet")
    store.finish({"samples": 2})
    store.close()
    assert SampleStore.open(str(tmp_path), JOB, "parquet").summary == {"samples": 2}


def test_notes_are_kept_also_when_the_job_is_dropped(tmp_path: Path):
    store = filled(tmp_path, "jsonl")
    store.note("groups", {"tp": 2})
    store.close()
    for job in (JOB, {"other": 1}):
        again = SampleStore.open(str(tmp_path), job, "jsonl", force=job is not JOB)
        assert again.notes == {"groups": {"tp": 2}}
        again.close()


def test_any_filesystem_will_do():
    store = SampleStore.open("memory://batch/out", JOB, "parquet")
    store.add(sample(0, 1))
    store.finish({"samples": 1})
    again = SampleStore.open("memory://batch/out", JOB, "parquet")
    assert again.done.missing(0, 4) == [0, 2, 3] and again.summary == {"samples": 1}
    again.write_text("all.jsonl", (json.dumps(record) for record in again.records()))
    assert json.loads(again._fs.cat_file("/batch/out/all.jsonl"))["id"] == "r0"


def test_done_counts_rows_and_failures_once():
    done = Done()
    for index in range(3):
        done.add(1, index, 3, failed=index == 1)
    done.add(0, 0, 1, failed=False)
    assert (done.rows, done.failed_rows, done.samples) == (2, 1, 3)
    assert done.complete(1) and not done.complete(2) and done.missing(1, 3) == []
