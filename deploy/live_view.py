"""How `choral sample` shows a family: live in a terminal, line by line in a pipe, or as one JSON object.

Views only read the Family that the client fills. The live one redraws on a timer from another thread, always
within the height of the terminal; whole texts are printed once, at the end.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import IO, Protocol, Self

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from deploy.client import Child, Family, TokenProb

REFRESH_PER_S = 6
PANEL_WIDTH = 36
"""Narrowest panel, in cells."""
CELL_WIDTH = 24
"""Narrowest entry of the list, in cells."""
PANEL_LINES = 8
"""Most text lines of a panel."""
ANCHOR = 1024
"""Long texts are wrapped from a multiple of so many characters, so that earlier line breaks stay put."""
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


class View(Protocol):
    """Entered before the first chunk; left on an exception too, which then passes through."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def grew(self, changed: list[Child]) -> None:
        """These children just changed."""
        ...

    def ended(self, replay: str) -> None:
        """All children finished; `replay` is the command that repeats one of them."""
        ...


class _Silent:
    """A view that shows nothing while the children grow."""

    def __init__(self, family: Family, out: IO[str]) -> None:
        self._family, self._out = family, out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def grew(self, changed: list[Child]) -> None:
        pass


class JsonView(_Silent):
    """One JSON object at the end, and nothing if there is no good end."""

    def ended(self, replay: str) -> None:
        family = self._family
        choices = [asdict(child) for child in family.children]
        for choice, child in zip(choices, family.children, strict=True):
            choice["logprobs"] = [at._asdict() for at in child.logprobs]
        head = {"id": family.id, "model": family.model, "seed": family.seed}
        print(json.dumps({**head, "choices": choices, "usage": family.usage}), file=self._out)


class PlainView(_Silent):
    """Each child as lines that begin with `[index]`, as soon as it has finished; then a summary."""

    def grew(self, changed: list[Child]) -> None:
        for child in changed:
            if child.finish_reason is not None:
                self._print(child)

    def ended(self, replay: str) -> None:
        print(f"{summary(self._family)}\nreplay: {replay}", file=self._out, flush=True)

    def _print(self, child: Child) -> None:
        lines = [*child.text.split("\n"), *_logprob_lines(child), f"-- {verdict(child)}"]
        print("\n".join(f"[{child.index}] {line}" for line in lines), file=self._out, flush=True)


class LiveView:
    """The tails of all children while they grow, then every text in full."""

    def __init__(self, family: Family, prompt: str, console: Console) -> None:
        self._family, self._console = family, console
        frame = Frame(family, prompt)
        self._live = Live(frame, console=console, refresh_per_second=REFRESH_PER_S, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for child in self._family.children:
            self._console.print(_whole(child))

    def grew(self, changed: list[Child]) -> None:
        pass

    def ended(self, replay: str) -> None:
        self._console.print(Group(Rule(style="dim"), Text(summary(self._family))))
        # Breaks put in here would end up inside the quotes of what is copied: the terminal may wrap, nothing else.
        self._console.print(Text(f"replay: {replay}", style="dim"), soft_wrap=True)


class Frame:
    """One picture of a family that fits the console it is drawn on: panels if there is room, else a list."""

    def __init__(self, family: Family, prompt: str) -> None:
        self._family, self._prompt = family, clean(prompt)
        self._start = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, height, hidden = options.max_width, max(1, console.height - 3), 0
        if columns := panel_columns(len(self._family.children), width, height):
            yield Text(one_line(self._prompt, width), style="bold")
            yield self._panels(console, width, height, columns)
        else:
            body, hidden = self._list(width, height + 1)
            yield body
        yield Text(one_line(self._status(hidden), width), style="dim")

    def _status(self, hidden: int) -> str:
        family, seconds = self._family, time.monotonic() - self._start
        running = len(family.unfinished)
        parts = [
            f"{running} running",
            f"{len(family.children) - running} finished",
            f"{family.tokens} tokens",
        ]
        parts += [f"{family.tokens / seconds:.0f}/s"] if seconds > 0 else []
        parts += [f"{hidden} not shown"] if hidden else []
        return " · ".join([*parts, "Ctrl-C cancels"])

    def _panels(self, console: Console, width: int, height: int, columns: int) -> RenderableType:
        children = self._family.children
        rows = -(-len(children) // columns)
        lines = min(PANEL_LINES, height // rows - 2)
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [_panel(child, console, width // columns - 4, lines) for child in children]
        for row in range(rows):
            grid.add_row(*panels[row * columns : (row + 1) * columns])
        return grid

    def _list(self, width: int, height: int) -> tuple[RenderableType, int]:
        """One line per child, in columns as needed; the unfinished first where not all fit."""
        children = self._family.children
        columns = min(-(-len(children) // height), max(1, width // CELL_WIDTH))
        shown = sorted(children, key=lambda child: child.finish_reason is not None)[: columns * height]
        shown.sort(key=lambda child: child.index)
        rows = -(-len(shown) // columns)
        cells = [_cell(child, width // columns) for child in shown]
        lines = [Text.assemble(*cells[row::rows]) for row in range(rows)]
        return Group(*lines), len(children) - len(shown)


def panel_columns(children: int, width: int, height: int) -> int:
    """Fewest columns in which every child gets a panel of three rows; 0 when there are none."""
    for columns in range(1, max(1, width // PANEL_WIDTH) + 1):
        if height // -(-children // columns) >= 3:
            return columns
    return 0


def verdict(child: Child) -> str:
    """How a child stands, in a few words."""
    reason = child.finish_reason or "unfinished"
    detail = f" at {child.stop_reason!r}" if child.stop_reason is not None else ""
    return f"{reason}{detail}, {child.tokens} tokens"


def summary(family: Family) -> str:
    """One line on the whole family."""
    reasons = Counter(child.finish_reason or "unfinished" for child in family.children)
    usage = family.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return " · ".join(
        (
            f"seed {family.seed}",
            f"{len(family.children)} children: " + ", ".join(f"{n} {reason}" for reason, n in reasons.items()),
            f"{usage.get('completion_tokens', family.tokens)} completion tokens",
            f"{usage.get('prompt_tokens', 0)} prompt tokens ({cached} cached)",
        )
    )


def clean(text: str) -> str:
    """The text without anything that moves a cursor: a model may write escape sequences too."""
    return "".join(c if c == "\n" or c.isprintable() else "    " if c == "\t" else "·" for c in text)


def one_line(text: str, width: int) -> str:
    """The beginning of a text as one line of at most `width` cells."""
    line = text.replace("\n", " ")
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def last_line(text: str, width: int) -> str:
    """The end of a text as one line of exactly `width` cells."""
    line = clean(text[-width:]).replace("\n", " ")
    while cell_len(line) > width:
        line = line[1:]
    return set_cell_size(line, width)


def last_lines(text: str, console: Console, width: int, lines: int) -> Text:
    """The end of a text, wrapped, as at most `lines` lines."""
    start = max(0, len(text) - width * lines) // ANCHOR * ANCHOR
    wrapped = Text(clean(text[start:])).wrap(console, width)
    return Text("\n").join(wrapped[-lines:])


def _colour(child: Child) -> str:
    return COLOURS[child.index % len(COLOURS)]


def _panel(child: Child, console: Console, width: int, lines: int) -> Panel:
    running = child.finish_reason is None
    state = f"{child.tokens} tokens" if running else verdict(child)
    return Panel(
        last_lines(child.text, console, width, lines),
        title=f"\\[{child.index}] {state}",
        title_align="left",
        border_style=_colour(child) if running else f"dim {_colour(child)}",
        height=lines + 2,
    )


def _cell(child: Child, width: int) -> Text:
    """Index, tokens, a mark for the finish, and the end of the text, padded to `width` cells."""
    mark = {None: "▸", "stop": "✓", "length": "■"}.get(child.finish_reason, "✗")
    head = f"{child.index:>3} {child.tokens:>4} {mark} "
    style = _colour(child) if child.finish_reason is None else f"dim {_colour(child)}"
    return Text.assemble((head, style), last_line(child.text, max(0, width - len(head) - 1)), " ")


def _whole(child: Child) -> RenderableType:
    title = Text(f"[{child.index}] {verdict(child)}", style=_colour(child))
    lines = [Text(clean(line), style="dim") for line in _logprob_lines(child)]
    return Group(Rule(title, align="left", style="dim"), Text(clean(child.text)), *lines)


def _logprob_lines(child: Child) -> Iterator[str]:
    for at in child.logprobs:
        yield "| " + _token_line(at)


def _token_line(at: TokenProb) -> str:
    tops = "  ".join(f"{token!r} {logprob:.3f}" for token, logprob in at.top)
    drawn = "none" if at.logprob is None else f"{at.logprob:.3f}"
    return f"{at.token!r} {drawn}" + (f"   of {tops}" if tops else "")
