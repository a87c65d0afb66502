"""Charts of what the bench measured, as PNG. Takes plain results, knows no server; called by the bench's command."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.bench_sharing import PROMPTS_SIZE, SIZES_PROMPT, SharingPoint

SHARED, APART = "#1b7837", "#762a83"


def draw_sharing(points: Sequence[SharingPoint], folder: Path) -> list[Path]:
    """Step time against n and against prompt length, with sharing and without; one file each, written to `folder`."""
    by_size = [point for point in points if point.prompt_len == SIZES_PROMPT]
    by_prompt = [point for point in points if point.n == PROMPTS_SIZE]
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _chart(
            folder / "step-by-n.png",
            [(point.n, point) for point in by_size],
            "children of the family (n)",
            f"One decoding step, prompt of {SIZES_PROMPT} tokens",
        ),
        _chart(
            folder / "step-by-prompt.png",
            [(point.prompt_len, point) for point in by_prompt],
            "prompt tokens",
            f"One decoding step, {PROMPTS_SIZE} children",
        ),
    ]


def _chart(path: Path, points: Sequence[tuple[int, Any]], label: str, title: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    places = [place for place, _ in points]
    for name, colour, field in (("prompt read per child", APART, "apart_s"), ("prompt shared", SHARED, "shared_s")):
        axes.plot(places, [1000 * getattr(p, field) for _, p in points], "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
