"""See `tests.system.batch_kills`: here in a size that takes minutes."""

from pathlib import Path

import pytest

from tests.system.batch_kills import Plan, check, compare

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_kills_lose_nothing_double_nothing_and_change_nothing(tmp_path: Path, embedded_model: Path):
    plan = Plan(rows=80, samples=4, tokens=64, kills=4)
    assert compare(plan, tmp_path)
    check(plan, tmp_path)
