"""The metrics page: Prometheus text from plain numbers, each name with a help line that says what it counts.

Numbers come in as dictionaries from groups, aggregator and router and are summed; nothing is counted here.
"""

from collections.abc import Iterable, Mapping

HELP = {
    "children_running": "children whose sequence is in the running batch",
    "children_waiting": "children that wait for their prompt or for a slot",
    "parents_alive": "parent requests not yet answered or cancelled",
    "children_alive": "child sequences the aggregator still merges",
    "children_placed": "child sequences the dispatcher counts on groups",
    "tokens_placed": "tokens the dispatcher counts on groups",
    "families_alive": "families (prompts with their children) known to the groups",
    "groups_alive": "groups that answered",
    "kv_blocks_used": "KV blocks held by a block table",
    "kv_blocks_total": "KV blocks there are",
    "kv_bytes_used": "memory of those KV blocks, over all ranks",
    "prompt_tokens_asked_total": "prompt tokens of families, once per family",
    "prompt_tokens_computed_total": "prompt tokens run through the model",
    "prompt_tokens_cached_total": "prompt tokens found in the prefix cache",
    "generation_tokens_total": "tokens drawn; one stands for all children of a greedy family",
    "recomputed_tokens_total": "output tokens computed again after a preemption",
    "parents_finished_total": "parent requests that got their whole reply",
    "children_finished_stop_total": "child sequences ended by end-of-sequence, a stop id or a stop string",
    "children_finished_length_total": "child sequences ended by max_tokens",
    "children_finished_abort_total": "child sequences cancelled",
    "children_finished_error_total": "child sequences that failed",
    "completion_tokens_total": "tokens of children as counted in usage",
    "siblings_total": "children of finished parents that sampled more than one",
    "siblings_distinct_total": "of those, how many different token sequences each prompt had",
    "preemptions_total": "sequences that gave their KV blocks back for a while",
}


def add_up(parts: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """Sum the numbers of the same name; what is no number, or a flag, is left out."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, int) and not isinstance(value, bool):
                total[name] = total.get(name, 0) + value
    return total


def render(numbers: Mapping[str, int]) -> str:
    """Prometheus text format 0.0.4. Names ending in _total are counters, but for the size of the pool."""
    lines = []
    for name, value in sorted(numbers.items()):
        kind = "counter" if name.endswith("_total") and name != "kv_blocks_total" else "gauge"
        lines += [
            f"# HELP choral_{name} {HELP.get(name, name.replace('_', ' '))}",
            f"# TYPE choral_{name} {kind}",
            f"choral_{name} {value}",
        ]
    return "\n".join(lines) + "\n"
