"""What is missing is named, for every way the ranks of a group may lie; threads share the cores out."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig
from cluster.placement import bundles, group_options, missing_resources, threads_per_rank

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def lacking(config: ClusterConfig, device: str, nodes) -> list[str]:
    return missing_resources(bundles(config, device), config.groups, config.placement, nodes)


def test_enough_room_lacks_nothing():
    assert lacking(ClusterConfig(tp=2, groups=2), "cpu", [{"CPU": 3.0}, {"CPU": 1.0}]) == []


@pytest.mark.parametrize(
    ("config", "device", "nodes", "words"),
    [
        (ClusterConfig(tp=3), "cpu", [{"CPU": 2.0}], "CPU: 3 needed, 2 free"),
        (ClusterConfig(tp=3, threads=4), "cpu", [{"CPU": 8.0}], "CPU: 12 needed, 8 free"),
        (ClusterConfig(groups=2), "cuda", [{"CPU": 8.0, "GPU": 1.0}], "GPU: 2 needed, 1 free"),
        (ClusterConfig(), "cuda", [{"CPU": 8.0}], "GPU: 1 needed, 0 free"),
        (ClusterConfig(), "cpu", [{"CPU": 0.5}, {"CPU": 0.5}], "no node has room"),
        (ClusterConfig(tp=2, placement="STRICT_PACK"), "cpu", [{"CPU": 1.0}] * 2, "STRICT_PACK, and no node"),
        (ClusterConfig(tp=2, placement="STRICT_SPREAD"), "cpu", [{"CPU": 9.0}], "STRICT_SPREAD, and there are too few"),
    ],
)
def test_what_is_missing_is_named(config: ClusterConfig, device: str, nodes, words: str):
    assert words in " ".join(lacking(config, device, nodes))


@given(
    slots=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    groups=st.integers(1, 2),
    tp=st.integers(1, 3),
    placement=st.sampled_from(STRATEGIES),
)
def test_room_is_found_exactly_where_some_assignment_of_ranks_to_nodes_exists(slots, groups, tp, placement):
    def allowed(ranks: tuple[int, ...]) -> bool:
        families = [ranks[start : start + tp] for start in range(0, len(ranks), tp)]
        if placement == "STRICT_PACK" and any(len(set(family)) > 1 for family in families):
            return False
        if placement == "STRICT_SPREAD" and any(len(set(family)) < tp for family in families):
            return False
        return all(ranks.count(node) <= room for node, room in enumerate(slots))

    possible = any(allowed(ranks) for ranks in product(range(len(slots)), repeat=groups * tp))
    config = ClusterConfig(groups=groups, tp=tp, placement=placement)
    assert (lacking(config, "cpu", [{"CPU": float(room)} for room in slots]) == []) == possible


@pytest.mark.parametrize(
    ("config", "nodes", "threads"),
    [
        (ClusterConfig(), [8.0], 8),
        (ClusterConfig(groups=2, tp=2), [8.0], 2),
        (ClusterConfig(tp=4), [2.0], 1),
        (ClusterConfig(tp=2), [0.0, 8.0, 8.0], 8),
        (ClusterConfig(), [8.0, 4.0], 4),
        (ClusterConfig(threads=3), [8.0], 3),
    ],
)
def test_threads_share_the_cores_out(config: ClusterConfig, nodes: list[float], threads: int):
    assert threads_per_rank(config, "cpu", [{"CPU": cores} for cores in nodes]) == threads


def test_on_gpus_threads_are_left_to_torch_unless_given():
    assert threads_per_rank(ClusterConfig(), "cuda", [{"CPU": 8.0}]) is None
    assert threads_per_rank(ClusterConfig(threads=2), "cuda", [{"CPU": 8.0}]) == 2


@pytest.mark.parametrize("placement", STRATEGIES)
def test_serve_is_told_how_the_ranks_lie_and_how_long_they_may_drain(placement):
    config = ClusterConfig(tp=2, threads=3, placement=placement, drain_timeout_s=7)
    options = group_options(config, "cuda")
    assert options["placement_group_strategy"] == placement
    assert options["placement_group_bundles"] == [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert options["ray_actor_options"]["num_cpus"] == 3.0
    assert options["graceful_shutdown_timeout_s"] == 7
