"""The Serve application of a Choral cluster: from a configuration to the deployments of router and groups.

`serve deploy` calls `build` inside the Ray cluster that is to run it, as the file `choral config` prints says;
`deploy.app` calls `application` with a cluster of its own. Knows Serve's options, not how Ray is started.
"""

import hashlib
from pathlib import Path

import ray
from ray import serve

from cluster.config import ClusterConfig
from cluster.placement import group_options, threads_per_rank
from cluster.worker_group import WorkerGroup
from deploy.serve_config import refuse_starter_fields
from router.ingress import Ingress, router_options
from workers.checkpoint import resolve
from workers.model_config import ModelConfig
from workers.tensor_parallel import ShardPlan


def build(config: ClusterConfig) -> serve.Application:
    """The application a Serve config file asks for. Raises ValueError naming the argument that is wrong."""
    refuse_starter_fields(config)
    device = cluster_device(config)
    check_model(config, resolve(config.model), device)
    return application(config, device)


def application(config: ClusterConfig, device: str, *, listen: bool = False) -> serve.Application:
    """Router and groups on the Ray cluster this process is connected to; `device` is "cpu" or "cuda".

    With `listen` the router serves HTTP itself, on its own node, and Serve needs no proxy.

    They know by a common name that they are of one configuration: in an update those of two live side by side.
    """
    router = serve.deployment(Ingress).options(**router_options(config.drain_timeout_s))
    return router.bind(config, groups_alone(config, device), _generation(config), listen)


def groups_alone(config: ClusterConfig, device: str) -> serve.Application:
    """The groups without a router, for a job that asks them itself."""
    groups = serve.deployment(WorkerGroup).options(**group_options(config, device))
    threads = threads_per_rank(config, device, node_resources())
    return groups.bind(config, device, threads, _generation(config))


def _generation(config: ClusterConfig) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]


def cluster_device(config: ClusterConfig) -> str:
    """Where the model runs on the Ray cluster this process is connected to: "auto" takes GPUs if any node has one."""
    if config.device != "auto":
        return config.device
    return "cuda" if any(node.get("GPU") for node in node_resources()) else "cpu"


def node_resources() -> list[dict[str, float]]:
    """What each living node of the Ray cluster has in all."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_model(config: ClusterConfig, folder: Path, device: str) -> None:
    """Find here what would stop every group: an unsupported model, a group size it cannot be cut into, lengths.

    Raises ValueError naming it.
    """
    model = ModelConfig.from_folder(folder)
    ShardPlan.build(model, config.tp, exact=config.engine(str(folder)).shards_exactly(device))
    model.checked_len(config.max_model_len)
