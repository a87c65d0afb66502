"""The `choral` command: parses, hands over to a command, and turns errors into a line and an exit code.

0 done; 1 the cluster or the server failed; 2 a bad option or configuration file; 3 some rows of a batch failed;
130 interrupted; 141 nobody reads the output any more. Imports nothing heavy before a command needs it, so that
`choral --help` is quick.
"""

import argparse
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deploy.batch import add_batch_options, run_batch
from deploy.bench import add_bench_options, run_bench
from deploy.errors import CommandError
from deploy.options import add_cluster_options
from deploy.ray_environment import set_own_environment
from deploy.sample import add_sample_options, run_sample
from deploy.score import add_score_options, run_score
from deploy.serve import interrupt_on_sigterm, run_serve
from deploy.serve_config import run_config

INTERRUPTED = 130
READER_GONE = 141
"""What a shell reports of a command that SIGPIPE ended."""
EPILOG = """\
examples:
  choral sample "Name a colour." -n 8       start a server, ask it, stop it
  choral serve --groups 2 --tp 2            two groups of two ranks, on port 8000
  choral sample "Name a colour." -n 8 --url http://127.0.0.1:8000
  choral batch questions.jsonl --output samples -n 64
  choral bench --serve                      measure a server started for it

`choral COMMAND --help` lists the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `choral` script; returns the exit code."""
    args = make_parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    interrupt_on_sigterm()
    set_own_environment()
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"choral: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("choral: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it exits
        return READER_GONE


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; every command leaves its function in `run`."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
    parser = argparse.ArgumentParser(
        "choral",
        description="A serving cluster for parallel sampling: one prompt, many samples.",
        epilog=EPILOG,
        formatter_class=layout,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Any:
        sub = commands.add_parser(name, help=text, description=text + ".", formatter_class=layout, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    add_cluster_options(command("serve", "Start a cluster and serve its HTTP API until Ctrl-C", run_serve))
    add_cluster_options(command("config", "Print a Serve config file, for `serve deploy` and KubeRay", run_config))
    add_sample_options(command("sample", "Ask one question and watch its samples grow", run_sample))
    add_batch_options(command("batch", "Sample a data set, and resume where the last run ended", run_batch))
    add_score_options(command("score", "Grade the samples of a batch: pass@k, maj@k and their curves", run_score))
    add_bench_options(command("bench", "Measure a server, or two in turns, with a clock for every child", run_bench))
    command("version", "Print the version", run_version)
    return parser


def run_version(args: argparse.Namespace) -> int:
    print(_version())
    return 0


def _version() -> str:
    return f"choral {importlib.metadata.version('choral')}"


if __name__ == "__main__":
    sys.exit(main())
