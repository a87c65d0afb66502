"""The rank actor: one process of a tensor-parallel group that is not rank 0. The only module here that imports Ray.

It joins the group's process group, loads its shard, and runs every step rank 0 sends over the plan channel. When it
cannot go on its process ends, so that rank 0 notices at once.
"""

import logging
import os
import threading

import ray

from workers.config import EngineConfig
from workers.model_runner import ModelRunner, resolve_backend, set_threads
from workers.plan_channel import PlanChannel
from workers.tensor_parallel import Communicator, init_communicator, open_store

log = logging.getLogger(__name__)


@ray.remote
class RankWorker:
    """Rank `rank` of `config.tp`. `start` may be called once."""

    def __init__(self, config: EngineConfig, rank: int, threads: int | None) -> None:
        logging.basicConfig(level=logging.INFO)
        set_threads(threads)
        self._config = config
        self._rank = rank
        self._loop: threading.Thread | None = None

    def start(self, host: str, port: int) -> None:
        """Join the group whose store rank 0 serves at host:port, load the shard, and begin to follow rank 0."""
        config = self._config
        store = open_store(host, port, is_host=False, timeout_s=config.collective_timeout_s)
        comm = init_communicator(
            self._rank,
            config.tp,
            store,
            backend=resolve_backend(config.device),
            timeout_s=config.collective_timeout_s,
            address=ray.util.get_node_ip_address(),
        )
        channel = PlanChannel(config.collective_timeout_s)
        runner = ModelRunner(config, comm)
        self._loop = threading.Thread(target=self._follow, args=(channel, runner, comm), name="ranks", daemon=True)
        self._loop.start()

    def _follow(self, channel: PlanChannel, runner: ModelRunner, comm: Communicator) -> None:
        try:
            while (step := channel.receive()) is not None:
                runner.execute(step)
            comm.close()
        except Exception:
            log.exception("rank %d cannot go on", self._rank)
            os._exit(1)
