"""What is missing is named."""

import pytest

from cluster.config import ClusterConfig
from cluster.placement import bundles, missing_resources


def test_enough_room_lacks_nothing():
    needed = bundles(ClusterConfig(tp=2), "cpu") * 2
    assert missing_resources(needed, [{"CPU": 3.0}, {"CPU": 1.0}]) == []


@pytest.mark.parametrize(
    ("config", "device", "nodes", "lacking"),
    [
        (ClusterConfig(tp=3), "cpu", [{"CPU": 2.0}], "CPU: 3 needed, 2 free"),
        (ClusterConfig(groups=2), "cuda", [{"CPU": 8.0, "GPU": 1.0}], "GPU: 2 needed, 1 free"),
        (ClusterConfig(), "cuda", [{"CPU": 8.0}], "GPU: 1 needed, 0 free"),
        (ClusterConfig(), "cpu", [{"CPU": 0.5}, {"CPU": 0.5}], "no node has room"),
    ],
)
def test_what_is_missing_is_named(config: ClusterConfig, device: str, nodes, lacking: str):
    assert lacking in " ".join(missing_resources(bundles(config, device) * config.groups, nodes))
