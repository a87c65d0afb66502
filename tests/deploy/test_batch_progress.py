"""What the progress lines say, from numbers alone."""

from deploy.batch_progress import Status, _Lines
from router.batch.runner import Progress

NOW = Progress(
    read_rows=50, done_rows=25, failed_rows=2, samples=90, tokens=900, children_alive=7, retries=1, seconds=30.0
)


def test_the_time_left_follows_from_the_part_of_the_input_that_is_done():
    status = Status(NOW, 0.5)
    assert status.fraction == 0.25 and status.left_s == 90.0 and status.tokens_per_s == 30.0
    assert status.line() == (
        " 25%  25 rows, 90 samples, 30 tok/s, 0:01:30 left, 7 children alive, 2 rows failed, 1 retries"
    )


def test_before_the_first_row_is_done_nobody_knows():
    status = Status(Progress(), 0.0)
    assert status.left_s is None and "? left" in status.line()


def test_a_log_gets_a_line_every_ten_seconds(capsys):
    lines = _Lines()
    for tenth in range(350):
        lines.show(Status(Progress(seconds=tenth / 10), 0.0))
    assert len(capsys.readouterr().err.splitlines()) == 3
