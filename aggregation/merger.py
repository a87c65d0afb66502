"""Puts the children of a parent together into one reply, and proves that it is whole before anyone sees it.

Called by `parent` when all children have finished. Knows nothing of how they got there.
"""

from collections import Counter
from collections.abc import Iterable

from aggregation.results import ChoiceDelta, IncompleteReplyError


def merge(choices: Iterable[ChoiceDelta], expected: int) -> list[ChoiceDelta]:
    """The choices by index. Raises IncompleteReplyError unless exactly 0..expected-1 are there, finished."""
    merged = sorted(choices, key=lambda choice: choice.index)
    counts = Counter(choice.index for choice in merged)
    faults = {
        "missing": [index for index in range(expected) if index not in counts],
        "repeated": [index for index, count in counts.items() if count > 1],
        "unknown": [index for index in counts if not 0 <= index < expected],
        "unfinished": [choice.index for choice in merged if choice.finish_reason is None],
    }
    if any(faults.values()):
        named = "; ".join(f"{fault}: {indices}" for fault, indices in faults.items() if indices)
        raise IncompleteReplyError(f"the reply is not complete: choices {named}")
    return merged
