"""`choral score` on a folder of known samples: the numbers it prints, growing folders, and its refusals."""

import json
import re
from pathlib import Path

import pytest

from deploy.cli import main
from router.batch.records import Sample
from router.batch.store import SampleStore

ANSWERS = {0: ["4", "4", "5", "4"], 1: ["7", "8", "9", "8"], 2: ["1"]}
"""The right ones are 4, 7 and 1; row 2 has more to come."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "prompt": "?", "answer": answer} for i, answer in enumerate((4, 7, 1))]
    lines = [*map(json.dumps, rows), "{bad"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    store = SampleStore.open(str(tmp_path / "out"), {}, "parquet")
    for row, answers in ANSWERS.items():
        for index, answer in enumerate(answers):
            text = f"First 0, so the answer is {answer}."
            store.add(Sample(id=str(row), row=row, index=index, row_samples=4, text=text, model_fingerprint="m"))
    error = {"type": "t", "code": "c", "param": None, "message": "m", "status": 400}
    store.add(Sample(id="3", row=3, error=error, model_fingerprint="m"))
    store.flush()
    return tmp_path


def score(folder: Path, *options: str) -> int:
    return main(["score", str(folder / "out"), "--input", str(folder / "in.jsonl"), *options])


@pytest.mark.ray
def test_the_table_and_the_curve(folder: Path, capsys):
    assert score(folder, "--field", "answer", "--extract", r"(\d+)\.", "--png", str(folder / "curve.png")) == 0
    out = capsys.readouterr().out
    assert "3 rows, 9 samples" in out
    table = {int(line.split()[0]): line.split() for line in out.splitlines() if re.match(r" +\d+ +\d+ ", line)}
    assert {k: int(line[1]) for k, line in table.items()} == {1: 3, 2: 2, 4: 2}
    assert [table[k][2] for k in (1, 2, 4)] == ["0.667", "0.750", "1.000"]
    assert [table[k][6] for k in (1, 4)] == ["0.667", "0.500"]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_a_function_grades_in_ray_tasks(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    (folder / "my_grader.py").write_text("def grade(row, sample):\n    return str(row['answer']) in sample['text']\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert score(folder, "--grader", "my_grader:grade") == 0
    assert "0.667" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--field and --grader"),
        (["--field", "a", "--grader", "m:f"], "--field and --grader"),
        (["--field", "a", "--extract", "("], "--extract"),
        (["--grader", "nowhere:f"], "nowhere"),
    ],
)
def test_bad_options_are_named(folder: Path, capsys, options: list[str], words: str):
    assert score(folder, *options) == 2
    assert words in capsys.readouterr().err


def test_a_folder_no_batch_has_written_is_refused(folder: Path, capsys):
    assert main(["score", str(folder), "--input", str(folder / "in.jsonl"), "--field", "a"]) == 1
    assert "no batch" in capsys.readouterr().err
