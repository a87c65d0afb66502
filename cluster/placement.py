"""What a cluster of groups needs from Ray, and whether it is to be had: bundles, Serve options, the bounded wait.

A group that can never be placed must not hang quietly: the demand is compared with what the nodes offer, and the error
names the resource that is missing.
"""

import time
from collections.abc import Callable
from typing import Any

from cluster.config import ClusterConfig
from cluster.group_router import PinnedRequestRouter

HEALTH_PERIOD_S = 2.0
"""How often Serve asks a replica; one whose process has ended is noticed then, too."""
GROUPS = "groups"
"""The deployment's name."""

RANK_ENVIRONMENT = {"GOMP_SPINCOUNT": "3000"}
"""How long torch's OpenMP threads spin for the next task before they sleep. By default so long that they take the
cores from the kernels' own threads, router, aggregator and client."""


class PlacementError(Exception):
    """The cluster lacks a resource; the message names it."""


def bundles(config: ClusterConfig, device: str) -> list[dict[str, float]]:
    """One bundle per rank of a group. Threads that were asked for are reserved; else a rank reserves one core."""
    gpu = {"GPU": 1.0} if device == "cuda" else {}
    return [{"CPU": float(config.threads or 1), **gpu} for _ in range(config.tp)]


def threads_per_rank(config: ClusterConfig, device: str, nodes: list[dict[str, float]]) -> int | None:
    """As configured; on CPU else the cores of `nodes` shared out between all ranks, at most those of the smallest."""
    if config.threads is not None or device != "cpu":
        return config.threads
    cores = [node["CPU"] for node in nodes if node.get("CPU")]
    fair = sum(cores) / (config.groups * config.tp)
    return max(1, int(min(fair, *cores))) if cores else 1


def group_options(config: ClusterConfig, device: str) -> dict[str, Any]:
    """Serve options of the deployment whose replicas are the groups."""
    from ray.serve.config import RequestRouterConfig

    one = bundles(config, device)
    return {
        "name": GROUPS,
        "num_replicas": config.groups,
        "placement_group_bundles": one,
        "placement_group_strategy": config.placement,
        "ray_actor_options": {
            "num_cpus": one[0]["CPU"],
            "num_gpus": one[0].get("GPU", 0),
            "runtime_env": {"env_vars": RANK_ENVIRONMENT},
        },
        "max_ongoing_requests": 100_000,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": 30,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "request_router_config": RequestRouterConfig(request_router_class=PinnedRequestRouter),
    }


def missing_resources(
    group: list[dict[str, float]], groups: int, placement: str, nodes: list[dict[str, float]]
) -> list[str]:
    """What the nodes lack to hold `groups` groups, as "GPU: 4 needed, 2 free in the cluster"; empty if they fit.

    Totals are compared first; what fits in total may still not fit node by node, which is said as well.
    """
    lacking = []
    for name in sorted(group[0]):
        want = groups * sum(bundle[name] for bundle in group)
        have = sum(node.get(name, 0) for node in nodes)
        if want > have:
            lacking.append(f"{name}: {want:g} needed, {have:g} free in the cluster")
    return lacking or ([] if _fits(group, groups, placement, nodes) else [_UNFIT[placement].format(group[0])])


_UNFIT = {
    "PACK": "no node has room for a rank of {}",
    "SPREAD": "no node has room for a rank of {}",
    "STRICT_PACK": "placement is STRICT_PACK, and no node has room for all ranks of a group, each {}",
    "STRICT_SPREAD": "placement is STRICT_SPREAD, and there are too few nodes with room for a rank of {}",
}


def _fits(group: list[dict[str, float]], groups: int, placement: str, nodes: list[dict[str, float]]) -> bool:
    """Exact, because all bundles are alike: only how many of them each node can hold counts."""
    bundle, size = group[0], len(group)
    room = [min(int(node.get(name, 0) // amount) for name, amount in bundle.items()) for node in nodes]
    if placement == "STRICT_PACK":
        return sum(slots // size for slots in room) >= groups
    if placement == "STRICT_SPREAD":
        return sum(min(slots, groups) for slots in room) >= groups * size
    return sum(room) >= groups * size


def wait_for_room(config: ClusterConfig, device: str, say: Callable[[str], None]) -> None:
    """Return when the cluster can hold every group, waiting for nodes that join; PlacementError after the timeout."""
    group = bundles(config, device)
    deadline = time.monotonic() + config.start_timeout_s
    told = False
    while lacking := missing_resources(group, config.groups, config.placement, _free_per_node()):
        what = "; ".join(lacking)
        if time.monotonic() >= deadline:
            raise PlacementError(
                f"cannot place {config.groups} group(s) of {config.tp} rank(s) "
                f"after {config.start_timeout_s:g} s: {what}"
            )
        if not told:
            say(f"waiting for resources: {what}")
            told = True
        time.sleep(0.5)


def _free_per_node() -> list[dict[str, float]]:
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return list(free.values())
