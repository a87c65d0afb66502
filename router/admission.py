"""Child slots: how many children this router has taken on, all or none per parent.

Counts children (prompts x n), not requests, so that a family weighs n. A plain object of the router's event loop; it
knows nothing of HTTP beyond the error it raises. The generation path holds a reservation from before tokenising until
the last byte.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import ApiError, Fault


class Admission:
    """Slots for `max_children` children at once."""

    def __init__(self, max_children: int) -> None:
        self.max_children = max_children
        self.in_use = 0
        """Children admitted now."""
        self.rejected = 0
        """Parents turned away with a 429 so far."""

    @contextmanager
    def reserve(self, children: int) -> Iterator[None]:
        """Hold slots for the children of one parent; they come back however the block is left.

        Raises ApiError: 400 for a parent that could never fit, 429 when others hold the slots now.
        """
        self._check(children)
        self.in_use += children
        try:
            yield
        finally:
            self.in_use -= children

    def _check(self, children: int) -> None:
        if children > self.max_children:
            message = f"prompts x n is {children}, more than the {self.max_children} children served at once"
            raise ApiError(Fault.FAMILY_TOO_LARGE, message, "n")
        if self.in_use + children > self.max_children:
            self.rejected += 1
            message = f"{self.in_use} of {self.max_children} children are in use; {children} more do not fit now"
            raise ApiError(Fault.BUSY, message)

    def metrics(self) -> str:
        """Prometheus text. Slots count children, rejections count parents."""
        return (
            "# HELP choral_admission_children_in_use Children admitted by this router now.\n"
            "# TYPE choral_admission_children_in_use gauge\n"
            f"choral_admission_children_in_use {self.in_use}\n"
            "# HELP choral_admission_children_limit Most children this router admits at once.\n"
            "# TYPE choral_admission_children_limit gauge\n"
            f"choral_admission_children_limit {self.max_children}\n"
            "# HELP choral_admission_rejected_parents_total Parents turned away because no slots were free.\n"
            "# TYPE choral_admission_rejected_parents_total counter\n"
            f"choral_admission_rejected_parents_total {self.rejected}\n"
        )
