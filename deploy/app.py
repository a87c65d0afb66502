"""Starts and stops a Choral cluster: Ray, the Serve application of router and groups, and the way back to nothing.

Called by the CLI and by tests. What is started here is stopped here; a Ray cluster that was joined is left running.
"""

import io
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import ray
import torch
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus, LoggingConfig

from cluster.config import ClusterConfig
from cluster.placement import GROUPS, PlacementError, wait_for_room
from deploy.application import application, check_model, cluster_device, groups_alone
from deploy.ray_environment import init_ray, set_ray_environment
from deploy.serve_config import APP
from deploy.signals import interrupts_held
from kernels import ops
from router.http_server import reserve
from router.ingress import ROUTER
from workers.checkpoint import cache_folder, resolve, tokenizer_folder
from workers.model_runner import resolve_device

DEPLOY_TIMEOUT_S = 600.0
"""Longest wait for the groups to load their model once they are placed."""
WATCH_S = 5.0
"""Each look takes some 15 ms of a core: Serve's answer has every option of the application in it."""
CANCEL_S = 10.0
"""Longest wait for the router to cancel what runs when the cluster is stopped at once."""
LAST_BYTES_S = 0.5
"""What HTTP server or proxy needs to pass on the end of the last replies."""

Say = Callable[[str], None]


class StartError(Exception):
    """The cluster cannot start; the message says what is missing or wrong."""


class RunningCluster:
    """A cluster that answers. As a context manager it stops at the end of the block."""

    def __init__(self, config: ClusterConfig, model_name: str, address: socket.socket | None = None) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{config.port}"
        self.model_name = model_name
        self._owns_ray = config.address is None
        self._address = address
        """Keeps the port for a router that replaces a lost one."""
        self._drain_timeout_s = config.drain_timeout_s
        self._stopped = False

    def wait(self, say: Say) -> None:
        """Return when the application has died; a signal leaves by exception.

        Serve replaces a part that is lost, for which it may take as long as for a start.
        """
        lost_at = None
        while (status := app_status()) not in (None, ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING):
            now = time.monotonic()
            if status is ApplicationStatus.RUNNING:
                if lost_at is not None:
                    say("all parts run again")
                lost_at = None
            elif lost_at is None:
                lost_at = now
                say(f"the application is {status.value.lower()}: Serve replaces a part of it")
            elif now - lost_at > DEPLOY_TIMEOUT_S:
                return
            time.sleep(WATCH_S)

    def drain(self) -> None:
        """Take no new requests, let running ones finish for at most `drain_timeout_s`, then stop everything."""
        if not self._stopped:
            with suppress(RayError, RayServeException, TimeoutError):
                # A router that is being replaced has nothing to finish, and a call to it waits.
                timeout_s = self._drain_timeout_s if _healthy(_app(), ROUTER) else CANCEL_S
                serve.get_app_handle(APP).drain.remote().result(timeout_s=timeout_s)
                time.sleep(LAST_BYTES_S)
        self.stop()

    def stop(self) -> None:
        """Stop at once; what runs ends with an error. Idempotent."""
        if not self._stopped:
            self._stopped = True
            try:
                with suppress(RayError, RayServeException, TimeoutError):
                    if _has_router():
                        serve.get_app_handle(APP).cancel_all.remote().result(timeout_s=CANCEL_S)
            finally:
                with self._address or nullcontext():
                    _stop(self._owns_ray)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Beside(Protocol):
    """What a command can do already while the groups load the model."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Must have let go of Ray when it returns."""
        ...


def start(
    config: ClusterConfig, *, say: Say = lambda line: None, beside: Beside | None = None, router: bool = True
) -> RunningCluster:
    """Start or join Ray and deploy; returns when the cluster is ready to answer. Raises StartError.

    `beside` is opened on the way, and closed again if the start fails. Without `router` there are only groups.
    """
    started = time.monotonic()
    try:
        folder = resolve(config.model)
        tokenizer_folder(folder)
        device = _local_device(config)
        check_model(config, folder, device)
        files = _files_folder(config)
        _reach(config.address)
        address = reserve(config.host, config.port)
    except (ValueError, OSError, RuntimeError) as error:
        raise StartError(str(error)) from error
    config = config.model_copy(update={"files_dir": files, "port": address.getsockname()[1]})
    if config.address is None:
        say(ops.implementation(device))
    else:
        address.close()  # Serve's proxies take it, here and elsewhere
    marks = {"files": time.monotonic()}
    try:
        with interrupts_held():  # from what it says on
            _start_ray(config, device, say, router=router)
        marks["Ray"] = time.monotonic()
        device = cluster_device(config) if config.address else device
        wait_for_room(config, device, say)
        _deploy(config, device, router)
        marks["Serve"] = time.monotonic()
        if beside is not None:
            beside.open()
        marks["groups"] = _wait_until_running(say)
        if router:
            marks["router"] = time.monotonic()
    except BaseException as error:
        try:
            if beside is not None:
                beside.close()
        finally:
            with address:
                _stop(config.address is None)
        if isinstance(error, PlacementError):
            raise StartError(str(error)) from error
        raise
    begins = [started, *marks.values()]
    parts = ", ".join(f"{part} {end - begin:.1f}" for begin, (part, end) in zip(begins, marks.items(), strict=False))
    say(f"ready after {begins[-1] - started:.1f} s ({parts})")
    return RunningCluster(config, config.served_name or folder.name, address)


def _local_device(config: ClusterConfig) -> str:
    """Where the model will run, as far as this machine can tell. Raises ValueError if a GPU is asked for in vain."""
    if config.address is None and config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU here")
    return config.device if config.device != "auto" else resolve_device("auto").type


def _files_folder(config: ClusterConfig) -> str:
    """Where files and batches are kept, made here so that a wrong place is found before anything starts."""
    folder = Path(config.files_dir).expanduser().absolute() if config.files_dir else cache_folder() / "files"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder)


def _reach(address: str | None) -> None:
    """Ray itself takes minutes to say that nobody listens at host:port. Raises OSError naming the address."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise OSError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def connect(config: ClusterConfig, say: Say) -> None:
    """Join the Ray at `config.address`, starting nothing. Raises OSError naming the address, or StartError."""
    _reach(config.address)
    _start_ray(config, config.device, say)


def _start_ray(config: ClusterConfig, device: str, say: Say, *, router: bool = True) -> None:
    """Join a cluster, or start one here with room for the ranks that share the cores."""
    say(f"joining Ray at {config.address}" if config.address else "starting Ray")
    options: dict[str, Any] = {"address": config.address}
    if config.address is None:
        wanted = config.groups * config.tp * (config.threads or 1)
        cores = os.cpu_count() or 1
        if device == "cpu" and wanted > cores:
            say(f"{config.groups * config.tp} ranks share {cores} cores")
        options = {"address": "local", "num_cpus": max(cores, wanted), "include_dashboard": config.dashboard}
    set_ray_environment(config, router)
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        init_ray(log_monitor=router, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StartError(f"Ray did not start or cannot be joined: {error}") from error


def _deploy(config: ClusterConfig, device: str, router: bool) -> None:
    """On a Ray started here the router listens itself; on one that was joined it may be anywhere, so proxies do."""
    logs = LoggingConfig(enable_access_log=False)
    alone = config.address is None
    proxies = router and not alone
    where = ProxyLocation.EveryNode if proxies else ProxyLocation.Disabled
    http = HTTPOptions(host=config.host, port=config.port) if proxies else None
    serve.start(proxy_location=where, http_options=http, logging_config=logs)
    # A Serve that was running already keeps its own address, and says so only in a log.
    listening = _get_global_client().http_config
    if proxies and (listening.host, listening.port) != (config.host, config.port):
        raise StartError(f"host, port: Serve on this cluster listens on {listening.host}:{listening.port} already")
    app = application(config, device, listen=alone) if router else groups_alone(config, device)
    targets = [serve.RunTarget(target=app, name=APP, route_prefix="/" if router else None, logging_config=logs)]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _app() -> ApplicationStatusOverview | None:
    return serve.status().applications.get(APP)


def app_status() -> ApplicationStatus | None:
    app = _app()
    return app.status if app else None


def _wait_until_running(say: Say) -> float:
    """Returns the monotonic time at which the groups were ready; the router was after them.

    Raises StartError with Serve's message when the deployment fails, or when it takes too long.
    """
    say("loading the model")
    deadline = time.monotonic() + DEPLOY_TIMEOUT_S
    groups_ready = None
    while (app := _app()) is None or app.status is not ApplicationStatus.RUNNING:
        if app is not None and app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise StartError(_failure())
        if time.monotonic() > deadline:
            raise StartError(f"the groups were not ready after {DEPLOY_TIMEOUT_S:.0f} s")
        if groups_ready is None and _healthy(app, GROUPS):
            groups_ready = time.monotonic()
        time.sleep(0.1)
    return groups_ready or time.monotonic()


def _has_router() -> bool:
    """Not so for the groups of a job."""
    return (app := _app()) is not None and ROUTER in app.deployments


def _healthy(app: ApplicationStatusOverview | None, name: str) -> bool:
    part = app.deployments.get(name) if app else None
    return part is not None and part.status is DeploymentStatus.HEALTHY


def _failure() -> str:
    """The last lines of what Serve says of the failed deployments: the exception is at their end."""
    app = serve.status().applications[APP]
    messages = [app.message, *(d.message for d in app.deployments.values() if d.message)]
    lines = [line for message in messages for line in message.strip().splitlines() if line.strip()]
    return "\n".join(lines[-8:])


def _stop(owns_ray: bool) -> None:
    """Remove the application, with Serve where it was its last one, and Ray where it was started here.

    Ray prints, of all places to stdout, that the actors it is told to end have ended; nobody needs that.
    """
    with redirect_stdout(io.StringIO()), interrupts_held():
        if not ray.is_initialized():
            return
        if not owns_ray and serve.status().applications.keys() - {APP}:
            serve.delete(APP, _blocking=True)
        else:
            serve.shutdown()
        ray.shutdown()
