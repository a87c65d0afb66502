"""What is set for a Ray that Choral starts itself: it shares the cores with the model, and every wake-up counts.

By default Ray runs its workers at low priority, so that anything else on the machine slows every step; it keeps
processes for tasks to come; and its loops, at their default pace, take several per cent of a core from the model all
the time. A variable that is set already stays. Called by `deploy.app` and `deploy.score`.
"""

import os
import signal
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from cluster.config import ClusterConfig
from deploy.signals import interrupts_held

_OWN = {"RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000"}
"""What a process that calls groups reads as well, when it imports Serve."""
_ALWAYS = {
    "RAY_worker_niceness": "0",
    "RAY_num_workers_soft_limit": "0",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_kill_idle_workers_interval_ms": "2000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "-1",
    "LOG_NAME_UPDATE_INTERVAL_S": "10",
    "METRICS_RECORD_INTERVAL_S": "60",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "2",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "20",
}
"""The two about log files are for the process that shows them on drivers, which looks for new ones ten times a second;
those after them for the dashboard, which weighs its own memory every five seconds and each worker's as often."""
_UNWATCHED = {"RAY_task_events_report_interval_ms": "0"}
"""Without a dashboard nobody can ask for tasks."""
_GROUPS_ALONE = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1"}
"""No client waits for what Serve does to the groups of a job."""


def set_own_environment() -> None:
    """To be called before Serve is imported."""
    _set(_OWN)


def set_ray_environment(config: ClusterConfig, router: bool) -> None:
    """To be called before Ray is started; its processes inherit what is set."""
    _set(_OWN | _ALWAYS | ({} if config.dashboard else _UNWATCHED) | ({} if router else _GROUPS_ALONE))


def _set(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def init_ray(*, log_monitor: bool = True, **options: Any) -> None:
    """`ray.init` that leaves signals to this process, and that no signal ends halfway. Raises as Ray does.

    A Ray started without `log_monitor` shows drivers nothing of what its workers write; it is in their files alone.
    On the way Ray puts in handlers, in Python and in native code, that end a process without a word, some by a crash.
    Its own processes shall hear SIGTERM, though they are started while this one does not.
    """
    import ray
    from ray._private.node import Node

    set_mask = signal.pthread_sigmask

    def mask_of_child(how: int, blocked: set[int]) -> set[int]:
        return set_mask(signal.SIG_SETMASK, blocked)

    # `ray start` has an option for it, `ray.init` none.
    without_monitor = nullcontext() if log_monitor else patch.object(Node, "start_log_monitor")
    with (
        interrupts_held(),
        patch.object(signal, "signal"),
        patch.object(signal, "pthread_sigmask", mask_of_child),
        without_monitor,
    ):
        ray.init(log_to_driver=False, configure_logging=False, **options)
