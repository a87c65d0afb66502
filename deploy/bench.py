"""The `choral bench` command: its options, the workload they make, the servers it is put to, and what is printed.

Measures any OpenAI-compatible server (`--url`), or one it starts itself (`--serve`), alone or beside another
(`--compare`). Called by the CLI with parsed arguments; everything heavy is imported when it is needed.
"""

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.bench_load import WARM_UP, Grid, Prefix, Row, Workload
from deploy.errors import CommandError, OptionError
from deploy.options import add_cluster_options, cluster_config, given, own_server_config, refuse_server_options
from deploy.serve import running_cluster, say
from workers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deploy.bench_floor import StepTime
    from deploy.bench_run import Repetition, RowResult

T = TypeVar("T")
SEEDS = 2**32
"""A seed that is not given is drawn below this."""
DEFAULT_REPEAT = 3
DEFAULT_VOCAB_SIZE = 32000
DEFAULT_TIMEOUT_S = 600.0
PAUSE_S = 2.0
PREFIXES: dict[str, Sequence[Prefix]] = {"cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm")}


class BenchError(CommandError):
    """Requests failed; the message names the first error."""


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Everything behind `choral bench`."""
    server = parser.add_argument_group("server")
    either = server.add_mutually_exclusive_group(required=True)
    either.add_argument("--url", help="server to measure, e.g. http://127.0.0.1:8000; --model then is its name there")
    either.add_argument("--serve", action="store_true", help="start a server with the options below, and stop it")
    server.add_argument("--compare", metavar="URL", help="a second server, asked in turns with the first")
    server.add_argument("--model2", metavar="NAME", help="the model's name there (default: the first it lists)")
    _add_grid_options(parser.add_argument_group("grid", "Lists are separated by commas; all combinations are rows."))
    _add_run_options(parser.add_argument_group("run"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write everything measured there; - for stdout, and no table")
    output.add_argument("--charts", metavar="DIR", help="with --serve: draw there what sharing a prompt saves, as PNG")
    output.add_argument("--floor", action="store_true", help="with --serve: the engine's step time over its floor")
    add_cluster_options(parser.add_argument_group("server started here", "As for `choral serve`, but on a free port."))


def _add_grid_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prompt-len", type=_counts, default=[128], metavar="N,...", help="prompt tokens (default: 128)")
    add("-n", "--n", type=_counts, default=[1, 8, 32], metavar="N,...", help="children per parent (default: 1,8,32)")
    add("--parents", type=_counts, metavar="N,...", help="parents under way at once (default: 1)")
    add("--rate", type=_list(_rate), metavar="R,...", help="parents per second, Poisson, instead of --parents")
    add("--requests", type=_count, metavar="N", help="parents per repetition (default: as many as --parents)")
    add("--max-tokens", type=_counts, default=[64], metavar="N,...", help="tokens per child (default: 64)")
    add("--top-p", type=_list(float), default=[1.0], metavar="X,...", help="(default: 1.0)")
    add("--logprobs", type=_list(_logprobs), default=[None], metavar="K,...", help="a number or none (default: none)")
    add("--temperature", type=_list(float), default=[1.0], metavar="X,...", help="(default: 1)")
    add("--prefix", choices=PREFIXES, default="cold", help="prompts new to the server, or the same (default: cold)")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    seeds = "of prompts and arrivals; a seed used before finds its prompts in a server's cache (default: drawn)"
    add("--seed", type=int, metavar="N", help=seeds)
    add("--repeat", type=_count, default=DEFAULT_REPEAT, metavar="N", help="repetitions (default: %(default)s)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="ask for all tokens (default: yes)")
    add(
        "--vocab-size", type=_count, default=DEFAULT_VOCAB_SIZE, metavar="N", help="ids below it (default: %(default)s)"
    )
    add("--extra", type=_object, default={}, metavar="JSON", help="an object with further fields of each request")
    pause = f"wait before each repetition (default: {PAUSE_S:g} with --compare, so that the other server is at rest)"
    add("--pause", type=_seconds, metavar="S", help=pause)
    add("--timeout", type=_rate, default=DEFAULT_TIMEOUT_S, metavar="S", help="longest silence (default: %(default)g)")


def run_bench(args: argparse.Namespace) -> int:
    """Measure and print. Raises OptionError before anything is started, BenchError when a request failed."""
    workload = _workload(args)
    _check_servers(args)
    with _first_server(args) as (url, name):
        urls = [url, *([args.compare] if args.compare is not None else [])]
        servers = [_named(url, name) for url, name in zip(urls, (name, args.model2), strict=False)]
        pause_s = (PAUSE_S if args.compare else 0.0) if args.pause is None else args.pause
        results = _measure(workload, servers, args.timeout, pause_s)
    floor = _floor(args) if args.floor else []
    _report(args, workload, servers, results, floor)
    if args.charts is not None:
        _draw_charts(args)
    if errors := [error for result in results for error in result.errors]:
        raise BenchError(f"failed requests: {len(errors)}; the first: {errors[0]}")
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    """What the options ask for, every row checked. Raises OptionError."""
    if args.rate is not None and args.parents is not None:
        raise OptionError("--rate and --parents exclude each other")
    if args.rate is not None and args.requests is None:
        raise OptionError("--rate needs --requests")
    axes = {name: getattr(args, name) for name in ("prompt_len", "n", "max_tokens", "top_p", "logprobs", "temperature")}
    load = {"parents": args.parents or [1], "rate": args.rate or [], "requests": args.requests}
    rows = Grid(**axes, **load, prefix=PREFIXES[args.prefix]).rows()
    seed = random.SystemRandom().randrange(SEEDS) if args.seed is None else args.seed
    run = {name: getattr(args, name) for name in ("repeat", "vocab_size", "ignore_eos", "extra")}
    workload = Workload(rows=rows, seed=seed, **run)
    try:
        for row in rows:
            _check_row(row)
        workload.bodies(0, WARM_UP, "")
    except ValueError as error:
        raise OptionError(str(error)) from error
    return workload


def _check_row(row: Row) -> None:
    SamplingParams(
        seed=0, max_tokens=row.max_tokens, top_p=row.top_p, logprobs=row.logprobs, temperature=row.temperature
    )


def _check_servers(args: argparse.Namespace) -> None:
    """Refuse what could only fail at the end, and options that would have no effect. Raises OptionError."""
    if args.json not in (None, "-") and not Path(args.json).resolve().parent.is_dir():
        raise OptionError(f"--json {args.json}: there is no such folder")
    if args.model2 is not None and args.compare is None:
        raise OptionError("--model2 is the name at --compare, which is missing")
    if not args.serve:
        own = (("--floor", args.floor), ("--charts", args.charts is not None))
        refuse_server_options(args, *(name for name, is_given in own if is_given))


@contextlib.contextmanager
def _first_server(args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """The address to ask first, and the name of the model there if it is known already."""
    if args.url is not None:
        yield args.url, given(args).get("model")
        return
    config = own_server_config(args)
    if max(args.n) > config.max_n:
        raise OptionError(f"n {max(args.n)} is more than max_n ({config.max_n}) allows; see --max-n")
    with running_cluster(config) as cluster:
        yield cluster.url, cluster.model_name


def _named(url: str, model: str | None) -> dict[str, str]:
    """A server with the name of its model. Raises CommandError when it does not answer."""
    from deploy.client import connect, served_model

    with connect(url) as client:
        return {"url": url, "model": model or served_model(client)}


def _measure(workload: Workload, servers: list[dict[str, str]], timeout_s: float, pause_s: float) -> "list[RowResult]":
    import asyncio

    from deploy.bench_client import connect
    from deploy.bench_run import Runner, Server

    async def measure() -> "list[RowResult]":
        async with contextlib.AsyncExitStack() as stack:
            asked = []
            for server in servers:
                client = await stack.enter_async_context(connect(server["url"], timeout_s))
                asked.append(Server(client, server["model"]))
            progress = _progress(workload, len(asked))
            return await Runner(workload=workload, servers=asked, progress=progress, pause_s=pause_s).run()

    return asyncio.run(measure())


def _progress(workload: Workload, servers: int) -> "Callable[[Row, int, Repetition], None]":
    """A line on stderr for every repetition measured."""
    from deploy.bench_report import progress_line

    total, done = len(workload.rows) * workload.repeat * servers, 0
    say(f"seed {workload.seed}, {len(workload.rows)} rows, {workload.repeat} repetitions")

    def show(row: Row, place: int, measured: "Repetition") -> None:
        nonlocal done
        done += 1
        say(f"[{done}/{total}] {progress_line(row, place if servers > 1 else None, measured)}")

    return show


def _floor(args: argparse.Namespace) -> "list[StepTime]":
    """The engine's step over its floor, for the model that was served. Raises CommandError."""
    from deploy.bench_floor import FloorError, measure_floor
    from workers.checkpoint import resolve

    say("measuring the engine's step and its matrix products alone")
    try:
        return measure_floor(resolve(cluster_config(args).model))
    except FloorError as error:
        raise CommandError(f"the step could not be measured: {error}") from error


def _draw_charts(args: argparse.Namespace) -> None:
    """What sharing a prompt saves, for the model that was served. Raises CommandError."""
    from deploy.bench_charts import draw_sharing
    from deploy.bench_floor import FloorError
    from deploy.bench_sharing import measure_sharing
    from workers.checkpoint import resolve

    say("measuring decoding steps with the prompt shared and without")
    try:
        points = measure_sharing(resolve(cluster_config(args).model))
        for path in draw_sharing(points, Path(args.charts)):
            print(f"chart: {path}")
    except (FloorError, OSError) as error:
        raise CommandError(f"no charts: {error}") from error


def _report(
    args: argparse.Namespace,
    workload: Workload,
    servers: list[dict[str, str]],
    results: "list[RowResult]",
    floor: "list[StepTime]",
) -> None:
    from deploy.bench_report import Table, as_json, floor_json, floor_lines

    if args.json != "-":
        Table(workload, servers, results).print(sys.stdout)
        for line in floor_lines(floor):
            print(line)
    if args.json is None:
        return
    everything = as_json(workload, servers, results) | ({"floor": floor_json(floor)} if args.floor else {})
    text = json.dumps(everything, indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return
    try:
        Path(args.json).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {args.json}: {error.strerror or error}") from error


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _rate(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time")
    return value


def _logprobs(text: str) -> int | None:
    return None if text == "none" else int(text)


def _object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a JSON object")


def _list(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A parser of values separated by commas."""

    def read(text: str) -> list[T]:
        try:
            return [one(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,8") from error

    return read


_counts = _list(_count)
