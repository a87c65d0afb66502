"""What many samples per row say about a model: pass@k, maj@k, and how sure that is. Pure functions of graded samples.

Called by `deploy.score`. Knows nothing of files or graders.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Grade:
    """A sample's answer, None where its grader names none, and whether it is right."""

    answer: str | None
    correct: bool


Grades = Sequence[Grade]
"""Of one row, by sample number."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over rows, with the 95 % interval of a bootstrap over rows."""

    rows: int
    mean: float
    low: float
    high: float


def pass_at(grades: Grades, k: int) -> float:
    """The chance that one of k samples is right: the unbiased estimator of Chen et al. 2021, arXiv:2107.03374."""
    n, right = len(grades), sum(grade.correct for grade in grades)
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at(grades: Grades, k: int) -> float:
    """How often the most frequent of k answers is right, over disjoint groups; of equals the first wins."""
    groups = [grades[start : start + k] for start in range(0, len(grades) - k + 1, k)]
    return sum(_majority_is_right(group) for group in groups) / len(groups)


def _majority_is_right(grades: Grades) -> bool:
    ((winner, _),) = Counter(grade.answer for grade in grades).most_common(1)
    return next(grade.correct for grade in grades if grade.answer == winner)


def over_rows(rows: Sequence[Grades], k: int, measure: Callable[[Grades, int], float]) -> Estimate | None:
    """The mean of `measure` over the rows with at least k samples; None where there is none."""
    values = np.array([measure(grades, k) for grades in rows if len(grades) >= k])
    if not values.size:
        return None
    draws = np.random.default_rng(0).integers(values.size, size=(RESAMPLES, values.size))
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return Estimate(values.size, float(values.mean()), float(low), float(high))


def counts(most: int) -> list[int]:
    """The values of k to show: powers of two, and the largest."""
    return sorted({*(2**power for power in range(most.bit_length())), most}) if most else []
