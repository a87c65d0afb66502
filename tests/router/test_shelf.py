"""Entries appear whole, vanish at once, and are listed in the order they were made."""

from pathlib import Path

import pytest

from router.errors import ApiError, Fault
from router.shelf import STALE_S, Shelf, write_whole


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf", "thing-", "thing")


def put(shelf: Shelf, text: str = "") -> str:
    entry_id = shelf.new_id()
    with shelf.draft() as draft:
        (draft / "text").write_text(text)
        shelf.publish(draft, entry_id)
    return entry_id


def test_ids_are_listed_in_the_order_they_were_made(shelf: Shelf) -> None:
    made = [put(shelf) for _ in range(20)]
    assert shelf.ids() == made
    assert shelf.ids(newest_first=True) == made[::-1]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 7, 8])
def test_pages_hold_every_entry_once_also_when_the_cursor_is_gone(shelf: Shelf, newest_first: bool, limit: int) -> None:
    for _ in range(7):
        put(shelf)
    expected, found, after, more = shelf.ids(newest_first=newest_first), list[str](), None, True
    while more:
        page, more = shelf.page(lambda i: i, after=after, limit=limit, newest_first=newest_first)
        assert len(page) == limit or not more
        found += page
        after = page[-1]
        shelf.remove(after)
    assert found == expected


def test_what_load_leaves_out_counts_for_nothing(shelf: Shelf) -> None:
    first, second, third = (put(shelf) for _ in range(3))
    page, more = shelf.page(lambda i: None if i == second else i, after=None, limit=2, newest_first=False)
    assert (page, more) == ([first, third], False)


def test_a_draft_that_fails_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), shelf.draft() as draft:
        (draft / "text").write_text("half")
        raise RuntimeError
    assert shelf.ids() == []
    assert list((tmp_path / "shelf" / ".drafts").iterdir()) == []


def test_an_entry_that_is_there_stays_and_the_second_draft_goes(shelf: Shelf) -> None:
    entry_id = put(shelf, "first")
    with shelf.draft() as draft:
        (draft / "text").write_text("second")
        shelf.publish(draft, entry_id)
    assert not draft.exists()
    assert (shelf.path(entry_id) / "text").read_text() == "first"


def test_what_is_removed_is_not_there_and_cannot_be_removed_again(shelf: Shelf, tmp_path: Path) -> None:
    entry_id = put(shelf)
    assert shelf.remove(entry_id)
    assert not shelf.remove(entry_id)
    assert shelf.ids() == []
    assert list((tmp_path / "shelf" / ".drafts").iterdir()) == []


@pytest.mark.parametrize("entry_id", ["", "..", "thing-", "../thing-" + "0" * 28, "thing-" + "0" * 27 + "/", "other"])
def test_what_cannot_be_an_id_is_not_found_and_no_cursor(shelf: Shelf, entry_id: str) -> None:
    with pytest.raises(ApiError) as missing:
        shelf.path(entry_id)
    assert (missing.value.fault, missing.value.param) == (Fault.NOT_FOUND, "thing_id")
    with pytest.raises(ApiError) as bad:
        shelf.page(lambda i: i, after=entry_id, limit=1, newest_first=True)
    assert (bad.value.fault, bad.value.param) == (Fault.INVALID, "after")


def test_a_sweep_removes_drafts_of_the_dead_but_none_in_work(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "shelf" / ".drafts" / "left"
    left.mkdir()
    (left / "content").write_text("half")
    shelf.sweep()
    assert left.exists()
    later = left.stat().st_mtime + STALE_S + 10
    monkeypatch.setattr("router.shelf.time.time", lambda: later)
    shelf.sweep()
    assert not left.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("router.shelf.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
