"""The `choral sample` command: its options, the question they make, the server it is put to, and the view.

Asks a running server (`--url`) or one it starts itself on a free port and stops afterwards. Called by the CLI
with parsed arguments; everything heavy is imported when it is needed.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deploy.errors import OptionError
from deploy.options import add_cluster_options, given, option_name, own_server_config, refuse_server_options
from deploy.serve import running_cluster
from workers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deploy.client import Family, Question
    from deploy.live_view import View

DEFAULT_N = 4
DEFAULT_MAX_TOKENS = 128
SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
"""Options passed on to the API under the same name when they are given."""


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    """Everything behind `choral sample`."""
    parser.add_argument("prompt", metavar="PROMPT", help="the user's message, or the raw prompt with --completion")
    _add_sampling_options(parser.add_argument_group("sampling"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    server = parser.add_argument_group("server", "Ask a running server, or start one with the options below.")
    server.add_argument("--url", help="server to ask, e.g. http://127.0.0.1:8000; --model then is its name there")
    add_cluster_options(parser.add_argument_group("server started here", "As for `choral serve`, but on a free port."))


def run_sample(args: argparse.Namespace) -> int:
    """Ask and show. Raises OptionError, CommandError; KeyboardInterrupt cancels the family."""
    from deploy.client import Family, connect, served_model, stream

    question = _question(args)
    with _server(args, len(question.samples)) as (url, name), connect(url) as client:
        model = name or served_model(client)
        family = Family.of(question)
        updates = stream(client, question, model, family)
        with _view(args, family) as view, contextlib.closing(updates):
            for changed in updates:
                view.grew(changed)
        view.ended(shlex.join(replay(args, family)))
    return 0


def replay(args: argparse.Namespace, family: "Family") -> list[str]:
    """The command that generates the first child again, and it alone."""
    command = ["choral", "sample", "--seed", str(family.seed)]
    command += ["--samples", str(family.children[0].sample), "--max-tokens", str(args.max_tokens)]
    command += ["--completion"] if args.completion else []
    for name in SAMPLING:
        if name != "seed":
            command += _written(name, getattr(args, name))
    for name in ("logprobs", "url", "config"):
        command += _written(name, getattr(args, name))
    for name, value in given(args).items():
        command += _written(name, value)
    return [*command, *(["--"] if args.prompt.startswith("-") else []), args.prompt]


def _written(name: str, value: Any) -> list[str]:
    """An option as the command line takes it."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [option_name(name if value else f"no_{name}")]
    if isinstance(value, list):
        return [part for item in value for part in (option_name(name), str(item))]
    return [option_name(name), str(value)]


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-n", type=_positive, metavar="N", help=f"how many samples (default: {DEFAULT_N})")
    add("--samples", type=_sample_numbers, metavar="I,J,...", help="these sample numbers instead of 0..n-1")
    add("--seed", type=int, metavar="N", help="signed 64-bit seed; default: the server draws one")
    add(
        "--max-tokens",
        type=_positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="most tokens per sample (default: %(default)s)",
    )
    add("--temperature", type=float, metavar="X", help="0..2; 0 is greedy (default: 1)")
    add("--top-p", type=float, metavar="X", help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, metavar="N", help="keep the k most probable tokens")
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end a sample where this text appears; may be repeated",
    )
    add("--logprobs", type=int, metavar="K", help="show log-probabilities, with the K best tokens (0..20)")
    add("--completion", action="store_true", help="complete the raw prompt instead of chatting")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _sample_numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 3,5") from error
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} must hold distinct numbers >= 0")
    return numbers


def _question(args: argparse.Namespace) -> "Question":
    from deploy.client import Question

    if args.samples is not None and args.n not in (None, len(args.samples)):
        raise OptionError(f"-n {args.n} does not fit --samples with {len(args.samples)} numbers")
    return Question(
        prompt=args.prompt,
        samples=args.samples or tuple(range(args.n or DEFAULT_N)),
        replay=args.samples is not None,
        chat=not args.completion,
        max_tokens=args.max_tokens,
        logprobs=args.logprobs,
        sampling=_sampling(args),
    )


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields given, their ranges checked before anything is started."""
    fields = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    numbers = {"seed": 0} | {name: value for name, value in fields.items() if name != "stop"}
    try:
        SamplingParams(max_tokens=args.max_tokens, logprobs=args.logprobs, **numbers)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return fields


def _view(args: argparse.Namespace, family: "Family") -> "View":
    from rich.console import Console

    from deploy.live_view import JsonView, LiveView, PlainView

    if args.json:
        return JsonView(family, sys.stdout)
    if sys.stdout.isatty() and not (console := Console()).is_dumb_terminal:
        return LiveView(family, args.prompt, console)
    return PlainView(family, sys.stdout)


@contextlib.contextmanager
def _server(args: argparse.Namespace, children: int) -> Iterator[tuple[str, str | None]]:
    """The address to ask, and the name of the model there if it is known already."""
    if args.url is not None:
        refuse_server_options(args)
        yield args.url, given(args).get("model")
        return
    config = own_server_config(args)
    if children > config.max_n:
        raise OptionError(f"{children} samples are more than max_n ({config.max_n}) allows; see --max-n")
    with running_cluster(config) as cluster:
        yield cluster.url, cluster.model_name
