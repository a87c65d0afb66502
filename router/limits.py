"""How much one router takes on: the sizes a request may have. Set by the operator, read by every check.

Knows nothing of HTTP or of the model; `router.app.create_app` takes it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Raises ValueError naming the field that is out of range."""

    max_n: int = 128
    """Largest n of one request."""
    max_children: int = 4096
    """Children (prompts x n) admitted at once."""
    max_prompts: int = 1024
    """Most prompts in one completions request."""
    max_stop: int = 4
    """Most stop strings."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body."""
    max_file_bytes: int = 200 * 1024 * 1024
    """Largest uploaded file."""
    max_batch_lines: int = 50_000
    """Most requests of one batch."""
    running_children: int = 128
    """Children the groups compute at once; batches start none beyond."""
    batch_children: int = 64
    """Most children of all batches together at once."""
    keep_alive_s: float = 15.0
    """A stream silent for so long gets a comment line."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")
        if self.max_n > self.max_children:
            raise ValueError(f"max_n ({self.max_n}) is larger than max_children ({self.max_children})")
