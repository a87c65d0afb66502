"""The `choral config` command: cluster options as a Serve config file, which `serve deploy` and KubeRay take.

What the options say about the application become its arguments, host and port Serve's HTTP options. Options that only
say how `choral serve` finds or starts Ray have no place there and are refused. Called by the CLI; imports no Ray.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from deploy.errors import OptionError
from deploy.options import cluster_config

BUILDER = "deploy.application:build"
APP = "choral"
HTTP_FIELDS = frozenset({"host", "port"})
RAY_FIELDS = frozenset({"address", "dashboard", "start_timeout_s"})
"""How `choral serve` finds or starts Ray, and waits for it; Serve and KubeRay have their own ways."""


def run_config(args: argparse.Namespace) -> int:
    """Print the file. Raises OptionError naming an option that has no place in it."""
    config = cluster_config(args)
    if misplaced := sorted(config.model_fields_set & RAY_FIELDS):
        raise OptionError(f"{', '.join(misplaced)}: only for `choral serve`; a Serve config does not start Ray")
    if config.port == 0:
        raise OptionError("port: a Serve config needs one; 0 is only for `choral serve`")
    print("# Apply with: serve deploy FILE. The arguments are those of `choral serve`; see docs/deploy.md.")
    print(yaml.safe_dump(serve_config(config), sort_keys=False), end="")
    return 0


def serve_config(config: ClusterConfig) -> dict[str, Any]:
    """A Serve config (`ray.serve.schema.ServeDeploySchema`) of this one application. Defaults are not repeated."""
    given = config.model_dump(include=config.model_fields_set - HTTP_FIELDS - RAY_FIELDS)
    arguments = {"groups": config.groups, "tp": config.tp, **given}
    for name in ("model", "files_dir"):
        if (path := getattr(config, name)) is not None:
            arguments[name] = str(Path(path).expanduser().absolute())  # Ray's processes run in folders of their own
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": APP, "route_prefix": "/", "import_path": BUILDER, "args": arguments}],
    }


def refuse_starter_fields(config: ClusterConfig) -> None:
    """For what gets its arguments from a Serve config: raises ValueError naming those that would have no effect."""
    if misplaced := sorted(config.model_fields_set & (HTTP_FIELDS | RAY_FIELDS)):
        raise ValueError(f"{', '.join(misplaced)}: no argument of the application, only of `choral serve`")
