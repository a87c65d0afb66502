"""The Serve application of a Choral cluster: from a configuration to the deployments of router and groups.

`serve deploy` calls `build` inside the Ray cluster that is to run it, as the file `choral config` prints says;
`deploy.app` calls `application` with a cluster of its own. Knows Serve's options, not how Ray is started.
"""

import hashlib
from dataclasses import asdict
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
    options = asdict(config.engine("")) | {"device": device}
    del options["model_folder"]  # each group resolves the model on its own node
    groups = serve.deployment(WorkerGroup).options(**group_options(config, device))
    router = serve.deployment(Ingress).options(**router_options(config.drain_timeout_s))
    threads = threads_per_rank(config, device, node_resources())
    generation = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]
    bound = groups.bind(config.model, options, threads, config.push_interval_s, generation)
    return router.bind(config, bound, generation, listen)


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
