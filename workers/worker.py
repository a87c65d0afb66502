"""The rank actor: one process of a tensor-parallel group that is not rank 0. The only module here that imports Ray.

It joins the group's process group, loads its shard, and runs every step rank 0 sends over the plan channel. When it
cannot go on its process ends, so that rank 0 notices at once.
"""

import logging
import os
import threading
from concurrent.futures import Future

import ray

from workers.config import EngineConfig
from workers.lockstep import follow
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

    def start(self, host: str, port: int) -> None:
        """Join the group whose store rank 0 serves at host:port, load the shard, and begin to follow rank 0.

        One thread does all that computes, for the reason `cluster.engine_driver` gives.
        """
        joined: Future[None] = Future()
        threading.Thread(target=self._run, args=(host, port, joined), name="rank", daemon=True).start()
        joined.result()

    def _run(self, host: str, port: int, joined: "Future[None]") -> None:
        try:
            channel, runner, comm = self._join(host, port)
            joined.set_result(None)
        except BaseException as error:
            joined.set_exception(error)
            return
        self._follow(channel, runner, comm)

    def _join(self, host: str, port: int) -> tuple[PlanChannel, ModelRunner, Communicator]:
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
        return channel, ModelRunner(config, comm), comm

    def _follow(self, channel: PlanChannel, runner: ModelRunner, comm: Communicator) -> None:
        try:
            follow(runner, channel)
            comm.close()
        except Exception:
            log.exception("rank %d cannot go on", self._rank)
            os._exit(1)
