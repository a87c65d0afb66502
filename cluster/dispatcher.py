"""Places families on groups. A plain object in the router's process; it knows loads and liveness, not HTTP or Ray.

A family weighs its children and its tokens, siblings stay together, and the least loaded group wins. What was placed
is taken back child by child as they finish, or all at once when the parent is closed.
"""

from dataclasses import dataclass

MISSED_ROUNDS = 3


class NoGroupError(Exception):
    """No group takes families."""


@dataclass(slots=True)
class _Group:
    children: int = 0
    tokens: int = 0
    missed: int = 0
    """Rounds in a row in which the group did not answer."""

    def load(self, tokens_per_child: int) -> float:
        """Children at work, and tokens yet to be computed on the scale of a child."""
        return self.children + self.tokens / tokens_per_child


class Dispatcher:
    """`tokens_per_child` says how many tokens of a prompt weigh as much as one more running child."""

    def __init__(self, tokens_per_child: int = 256) -> None:
        self._tokens_per_child = tokens_per_child
        self._groups: dict[str, _Group] = {}
        self._placed: dict[tuple[str, int], tuple[str, int]] = {}

    @property
    def groups(self) -> list[str]:
        """Those that take families."""
        return [name for name, group in self._groups.items() if group.missed < MISSED_ROUNDS]

    def update_groups(self, answered: set[str]) -> set[str]:
        """Take the groups that answered a round of questions; returns those that are silent and get no more families.

        One missed round is not the end of a group, MISSED_ROUNDS in a row are. A silent group keeps what was placed
        on it until it is dropped, because it may be finishing just that.
        """
        for group in sorted(answered - self._groups.keys()):
            self._groups[group] = _Group()
        for name, state in self._groups.items():
            state.missed = 0 if name in answered else state.missed + 1
        return self._groups.keys() - self.groups

    def leave(self, group: str) -> None:
        """Place nothing more on a group that did not take a family, until it answers again."""
        if group in self._groups:
            self._groups[group].missed = MISSED_ROUNDS

    def drop_group(self, group: str) -> None:
        """Forget a group and all that was placed on it."""
        self._groups.pop(group, None)
        self._placed = {child: (where, w) for child, (where, w) in self._placed.items() if where != group}

    def place(self, parent_id: str, indices: list[int], prompt_tokens: int) -> str:
        """Choose a group for one family and count it there, and nowhere else any more. Raises NoGroupError."""
        for index in indices:
            self.finished(parent_id, index)
        name = self._least_loaded()
        share, rest = divmod(prompt_tokens, len(indices))
        for position, index in enumerate(indices):
            weight = share + (position < rest)
            self._placed[parent_id, index] = name, weight
            group = self._groups[name]
            group.children += 1
            group.tokens += weight
        return name

    def _least_loaded(self) -> str:
        """A group that missed the last round is only taken when there is no other."""
        if not (groups := self.groups):
            raise NoGroupError
        return min(groups, key=lambda g: (self._groups[g].missed, self._groups[g].load(self._tokens_per_child), g))

    def finished(self, parent_id: str, index: int) -> None:
        """One child is done, or given up. Idempotent."""
        if (placed := self._placed.pop((parent_id, index), None)) is None:
            return
        name, weight = placed
        group = self._groups[name]
        group.children -= 1
        group.tokens -= weight

    def release(self, parent_id: str, indices: range) -> None:
        """The parent is closed: nothing of it is placed any more."""
        for index in indices:
            self.finished(parent_id, index)

    def counters(self) -> dict[str, int]:
        return {
            "children_placed": len(self._placed),
            "tokens_placed": sum(group.tokens for group in self._groups.values()),
        }
