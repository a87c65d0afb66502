"""Clusters of several Ray nodes on this machine: groups over nodes, ranks over nodes, and the same bits throughout."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.config import ClusterConfig
from deploy.app import StartError, start
from tests.system.conftest import serve
from tests.system.requests import choices, complete

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

REQUEST = {"n": 4, "logprobs": 2, "seed": 5}


@contextmanager
def nodes(*cores: int) -> Iterator[str]:
    """A Ray cluster with one node per number; its address."""
    cluster = Cluster()
    try:
        for number in cores:
            cluster.add_node(num_cpus=number, object_store_memory=100 * 2**20)
        yield cluster.address
    finally:
        cluster.shutdown()


def group_nodes() -> list[list[str]]:
    """Per living placement group, that is per group, the node of every rank."""
    table = ray.util.placement_group_table().values()
    return [list(group["bundles_to_node_id"].values()) for group in table if group["state"] == "CREATED"]


@pytest.fixture(scope="module")
def expected(embedded_model: Path):
    """The answer of one rank on one node."""
    with serve() as server:
        return choices(complete(server.url, **REQUEST))


@pytest.mark.parametrize(("tp", "cores"), [(2, (1, 1)), (3, (1, 1, 1))])
def test_c2_a_group_over_several_nodes_gives_the_bits_of_one_rank(expected, tp: int, cores: tuple[int, ...]):
    with nodes(*cores) as address:
        config = ClusterConfig(address=address, port=0, tp=tp, placement="STRICT_SPREAD")
        with start(config) as running:
            (ranks,) = group_nodes()
            assert len(set(ranks)) == tp
            assert choices(complete(running.url, **REQUEST)) == expected


def test_groups_spread_over_the_nodes_and_ranks_pack_by_default(expected):
    with nodes(2, 2) as address, start(ClusterConfig(address=address, port=0, groups=2, tp=2)) as running:
        first, second = group_nodes()
        assert [len(set(first)), len(set(second))] == [1, 1]
        assert set(first) != set(second)
        assert choices(complete(running.url, **REQUEST)) == expected


def test_a_group_that_no_node_can_hold_whole_is_refused_and_a_joined_cluster_is_left_as_it_was(embedded_model: Path):
    with nodes(1, 1) as address:
        for config, words in (
            (ClusterConfig(address=address, tp=2, placement="STRICT_PACK"), "no node has room for all ranks"),
            (ClusterConfig(address=address, tp=3), "CPU: 3 needed, 2 free"),
            (ClusterConfig(address=address, groups=2, device="cuda"), "GPU: 2 needed, 0 free"),
        ):
            config = config.model_copy(update={"port": 0, "start_timeout_s": 1.0})
            with pytest.raises(StartError, match=words):
                start(config)
        assert not ray.is_initialized()
        with start(ClusterConfig(address=address, port=0, tp=2)) as running:
            assert len(complete(running.url, n=2)["choices"]) == 2
