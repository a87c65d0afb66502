"""Cluster options on the command line: one argparse option per ClusterConfig field, and back to a config.

Names, types, choices, defaults and help all come from the pydantic fields, so that an option is written once.
Knows nothing of Ray or HTTP. Called by the CLI alone.
"""

import argparse
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig
from deploy.errors import OptionError

_DEST = "cluster."
"""Prefix of the namespace entries that belong to the config: no other option can collide with them."""


def option_name(field: str) -> str:
    """How the command line writes a field."""
    return "--" + field.replace("_", "-")


def add_cluster_options(parser: argparse._ActionsContainer) -> None:
    """Add `--config FILE` and one option per field. An option not given leaves no trace in the namespace."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with these options as keys")
    for name, field in ClusterConfig.model_fields.items():
        _add_field(parser, name, field)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The cluster options that stood on the command line, by field name."""
    return {key.removeprefix(_DEST): value for key, value in vars(args).items() if key.startswith(_DEST)}


def refuse_server_options(args: argparse.Namespace, *others: str) -> None:
    """For a command that asks a running server: raises OptionError naming what only starts one, and `others`."""
    alien = [option_name(name) for name in given(args) if name != "model"]
    alien += ["--config"] if args.config is not None else []
    alien += others
    if alien:
        raise OptionError(f"{', '.join(alien)}: only for a server started here, not with --url")


def own_server_config(args: argparse.Namespace) -> ClusterConfig:
    """As `cluster_config`, for a server that a command starts for itself: on a free port and without Ray's dashboard,
    unless told otherwise.
    """
    return cluster_config(args, port=0, dashboard=False)


def cluster_config(args: argparse.Namespace, **defaults: Any) -> ClusterConfig:
    """The YAML file, if any, over `defaults`, with the options given on the command line on top.

    Raises OptionError naming the option or key that is wrong.
    """
    path: Path | None = args.config
    try:
        return ClusterConfig.load(path, given(args), defaults)
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"--config {path} is not valid YAML: {error}") from error
    except ValidationError as error:
        raise OptionError("; ".join(_complaints(error, path))) from error
    except ValueError as error:
        raise OptionError(str(error)) from error


def _complaints(error: ValidationError, path: Path | None) -> Iterator[str]:
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            yield f"{path}: unknown option {key!r}"
        else:
            yield f"{key}: {item['msg']}" if key else item["msg"].removeprefix("Value error, ")


def _add_field(parser: argparse._ActionsContainer, name: str, field: FieldInfo) -> None:
    kind, choices = _kind(field.annotation)
    extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        metavar = None if choices else {int: "N", float: "X"}.get(kind, name.upper())
        extra = {"type": kind, "choices": choices, "metavar": metavar}
    parser.add_argument(
        option_name(name),
        dest=_DEST + name,
        default=argparse.SUPPRESS,
        help=_help(field),
        **extra,
    )


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    if field.default is None or "default:" in text:
        return text
    shown = {True: "yes", False: "no"}[field.default] if field.annotation is bool else field.default
    return f"{text} (default: {shown})"


def _kind(annotation: Any) -> tuple[type, tuple[Any, ...] | None]:
    """The type of one value, and the values allowed. `X | None` reads an X: leaving it out means None."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not type(None))
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return type(choices[0]), choices
    return annotation, None
