"""The table of failures and how much an error may repeat of what it was sent."""

import pytest
from starlette.exceptions import HTTPException

from router.engine import GenerationError, NoHealthyGroupError
from router.errors import ApiError, Fault, clip, describe, listing
from tests.router.wire import assert_official


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_has_the_official_shape_and_sane_headers(fault: Fault) -> None:
    answer = fault.value
    assert_official("ErrorResponse", ApiError(fault, "why", "n").body())
    assert (int(answer.headers.get("retry-after", 0)) >= 1) == (answer.status in (429, 503))
    assert (answer.headers.get("x-should-retry") == "false") == (answer.status in (409, 500))
    assert (answer.type == "invalid_request_error") == (400 <= answer.status < 429)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (NoHealthyGroupError(), Fault.NO_GROUP),
        (GenerationError(), Fault.GENERATION_FAILED),
        (HTTPException(404), Fault.NOT_FOUND),
        (HTTPException(405), Fault.METHOD_NOT_ALLOWED),
        (HTTPException(413), Fault.BODY_TOO_LARGE),
        (ValueError("/etc/passwd"), Fault.INTERNAL),
    ],
)
def test_every_exception_finds_its_fault(error: Exception, fault: Fault) -> None:
    known = describe(error)
    assert known.fault is fault
    assert known.message
    assert "/etc" not in known.message


def test_echoes_are_cut_short_and_always_encode() -> None:
    assert len(clip("x" * 10_000)) == 200
    assert clip("\ud800") == "\\ud800"
    assert listing(list(range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    message = ApiError(Fault.INVALID, "y" * 100_000).body()["error"]["message"]
    assert len(message) == 2000
