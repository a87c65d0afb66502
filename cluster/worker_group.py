"""One tensor-parallel group as one Serve replica: its process is rank 0, the other ranks are its child actors.

The replica dies as a unit with its ranks and lives in one placement group with them. It takes families (hop 1), and
pushes their deltas to the aggregator the family names (hop 2). It knows neither HTTP nor text.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.engine_driver import EngineDriver
from cluster.group_calls import GroupCalls
from cluster.sinks import SinkAddress
from workers.checkpoint import resolve
from workers.config import EngineConfig
from workers.engine import Engine
from workers.lockstep import Lead
from workers.model_runner import ModelRunner, fingerprint, resolve_backend, set_threads
from workers.outputs import ChildRef, FamilyRequest
from workers.plan_channel import PlanChannel
from workers.tensor_parallel import Communicator, init_communicator, open_store
from workers.worker import RankWorker

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""How long a failed group tries to hand out its error deltas before its process ends."""


class WorkerGroup:
    """The deployment's class. `device` and `threads` are those of every rank; the model is resolved anew on the
    replica's node.

    `generation` names the configuration; routers of another one leave this group alone.
    """

    def __init__(self, cluster: ClusterConfig, device: str, threads: int | None, generation: str) -> None:
        started = time.monotonic()
        set_threads(threads)
        self.group: str = serve.get_replica_context().replica_id.unique_id
        self._generation = generation
        self._actor, self._node = ray.get_runtime_context().current_actor, ray.get_runtime_context().get_node_id()
        folder = resolve(cluster.model)
        self._model = {"model": cluster.model, "name": cluster.served_name or folder.name}
        config = replace(cluster.engine(str(folder)), device=device)
        self._ranks = [self._make_rank(config, rank, threads) for rank in range(1, config.tp)]
        self._driver = EngineDriver(
            self.group,
            lambda: self._build(config),
            push_interval_s=cluster.push_interval_s,
            idle=self._heartbeat,
            idle_s=min(config.collective_timeout_s / 4, 5.0),
            failed=self._die,
        )
        self._calls = GroupCalls(self._driver, self._node)
        log.info("group %s ready after %.1f s", self.group, time.monotonic() - started)

    def _build(self, config: EngineConfig) -> Engine:
        comm, self._channel = self._join(config)
        self._runner = ModelRunner(config, comm)
        ray.get(self._ready)
        engine = Engine(config, self._runner, Lead(self._runner, self._channel) if self._channel else None)
        exact = self._runner.exact
        self._about = {
            **self._model,
            "max_model_len": engine.max_model_len,
            "vocab_size": engine.vocab_size,
            "exact": exact,
            "max_running": config.max_running,
            "fingerprint": fingerprint(config),
        }
        if self._runner.device.type == "cpu" and not exact:
            log.warning("linear layers depend on their batch on this processor: children are not exact")
        return engine

    def _make_rank(self, config: EngineConfig, rank: int, threads: int | None) -> Any:
        placement = ray.util.get_current_placement_group()
        bundle = placement.bundle_specs[rank]
        actor = RankWorker.options(  # type: ignore[attr-defined]
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
        )
        return actor.remote(config, rank, threads)

    def _join(self, config: EngineConfig) -> tuple[Communicator, PlanChannel | None]:
        """Serve the group's store at this node's own address, already bound, then let every rank join."""
        self._ready: list[Any] = []
        if config.tp == 1:
            return Communicator(), None
        host, timeout_s = ray.util.get_node_ip_address(), config.collective_timeout_s
        store = open_store(host, 0, is_host=True, timeout_s=timeout_s)
        self._ready = [rank.start.remote(host, store.port) for rank in self._ranks]
        backend = resolve_backend(config.device)
        comm = init_communicator(0, config.tp, store, backend=backend, timeout_s=timeout_s, address=host)
        return comm, PlanChannel(config.collective_timeout_s)

    def _heartbeat(self) -> None:
        if self._channel is not None:
            self._channel.heartbeat()

    async def submit(self, group: str, families: Sequence[FamilyRequest], aggregator: SinkAddress) -> bool:
        """Take families, all or none; False if this is not `group`, which then is leaving and takes none either."""
        return group == self.group and await self._calls.submit(families, aggregator)

    async def abort(self, group: str, children: Sequence[ChildRef]) -> None:
        """Stop children; returns when none of them is in any rank's next step.

        A group that is leaving gets no calls, but the answers to its pushes name the children to stop.
        """
        if group == self.group:
            await self._calls.abort(children)

    async def stats(self) -> dict[str, Any]:
        """What this group is and does, and how to reach it. Answers during a long step: slow is not dead."""
        who = {"group": self.group, "generation": self._generation, "actor": self._actor}
        return {**who, "node": self._node, "local": self._calls.address, "about": self._about, **self._driver.stats}

    def check_health(self) -> None:
        if self._driver.failure is not None:
            raise RuntimeError(self._driver.failure)

    def _die(self) -> None:
        """End the process once the error deltas are out, so that Serve replaces the group at once."""
        threading.Thread(target=self._flush_and_exit, daemon=True).start()

    def _flush_and_exit(self) -> None:
        deadline = time.monotonic() + FLUSH_S
        while not self._driver.shipped and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(1)

    def __del__(self) -> None:
        """Serve calls this when it stops the replica, and bounds it: children that were taken are finished first.

        The child actors end with their owner.
        """
        if calls := getattr(self, "_calls", None):
            calls.leave()
            self._driver.drain()
            self._driver.stop()
            if self._channel is not None:
                self._channel.stop()
