"""The `choral batch` command: samples a whole data set on a Ray cluster, and goes on where a run before it ended.

Reads its options, opens the output folder, finds or starts groups, and runs `router.batch` over the input. Everything
heavy is imported when it is needed. Exit code: 0 all rows are fine, 3 some failed, 1 the job cannot go on now.
"""

import argparse
import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

from deploy.errors import CommandError, OptionError
from deploy.options import add_cluster_options, given, option_name, own_server_config
from deploy.serve import say

if TYPE_CHECKING:
    from router.batch.store import SampleStore
    from router.engine import ModelInfo

SOME_FAILED = 3
SAMPLING = {"n": int, "max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float}
"""Options that are the API's fields, for rows that do not have them."""
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
QUEUED = 2.0
"""Sequences under way per slot of the groups: what is above one waits there, so that no slot is ever idle."""
MAX_N, MAX_CHILDREN = 1 << 14, 1 << 16


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Everything behind `choral batch`."""
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="JSON lines or Parquet: files or folders, local or any fsspec URL")
    add("--output", required=True, metavar="DIR", help="folder for the samples; the same command again resumes there")
    add("--format", choices=("parquet", "jsonl", "openai"), default="parquet", help="default: %(default)s")
    add("--extra", default="", metavar="A,B", help="fields of the input that say nothing about sampling")
    add("--force", action="store_true", help="drop what another job has written to DIR, and start anew")
    add(
        "--look-ahead",
        type=int,
        default=256,
        metavar="N",
        help="rows read in advance, of which the longest goes first (default: %(default)s)",
    )
    add("--submit", metavar="ADDRESS", help="run as a job of the Ray whose dashboard is there, and follow its log")
    group = parser.add_argument_group("sampling", "For rows that do not say it themselves.")
    group.add_argument("-n", type=int, metavar="N", help="samples per row (default: 1)")
    for name, kind in SAMPLING.items():
        if name != "n":
            group.add_argument(option_name(name), type=kind, metavar="N" if kind is int else "X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end a sample here; may be repeated")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="rows get seeds from this and their id")
    add_cluster_options(parser.add_argument_group("groups started here", "Where no Choral runs at --address."))


def run_batch(args: argparse.Namespace) -> int:
    """Sample the input. Raises OptionError, CommandError; KeyboardInterrupt after finished samples are safe."""
    if args.look_ahead < 1:
        raise OptionError("--look-ahead: at least one row")
    if args.submit is not None:
        from deploy.batch_submit import submit

        return submit(args.submit, ["choral", *job_arguments(args)])
    return _Job(args).run()


def job_arguments(args: argparse.Namespace) -> list[str]:
    """The command line without `--submit`, local paths made absolute: a job has another working directory."""
    kept, rest = [], iter(args.argv)
    for word in rest:
        if word == "--submit":
            next(rest)
        elif not word.startswith("--submit="):
            kept.append(os.path.abspath(word) if word in (*args.input, args.output) and "://" not in word else word)
    return kept


class _Job:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        from deploy.batch_input import BatchInput

        self.args = args
        config = own_server_config(args)
        address = config.address or os.environ.get("RAY_ADDRESS")
        self.config = config.model_copy(update={"address": address})
        self.source = BatchInput(args.input, last=address is None)

    @property
    def defaults(self) -> dict[str, Any]:
        values = {name: getattr(self.args, name) for name in (*SAMPLING, "stop")}
        return {name: value for name, value in values.items() if value is not None}

    def run(self) -> int:
        from deploy import batch_cluster

        running = self.config.address is not None and batch_cluster.join(self.config, say)
        store = self._open(self._fingerprint(running))
        try:
            if store.summary is not None:
                batch_cluster.stop_left_groups(self.config, store, running)
                say("finished before: nothing is left to do")
            else:
                self._check_options(store, running)
                with batch_cluster.job_groups(self.config, store, running, say, self.source) as model:
                    try:
                        asyncio.run(_sample(self, model, store))
                    finally:
                        self.source.close()
            return self._conclude(store)
        finally:
            store.close()

    def _check_options(self, store: "SampleStore", running: bool) -> None:
        """Options of groups to start make no sense where others run."""
        from deploy.batch_cluster import is_own

        if running and not is_own(store) and (alien := self._group_options()):
            raise OptionError(f"{', '.join(alien)}: only for groups started here, but Choral runs on this cluster")

    def _group_options(self) -> list[str]:
        names = [option_name(name) for name in given(self.args) if name != "address"]
        return names + (["--config"] if self.args.config is not None else [])

    def _fingerprint(self, running: bool) -> str:
        """Of the model that will be asked."""
        if running and not self._group_options():
            from deploy.batch_cluster import about

            return about().fingerprint
        from workers.checkpoint import resolve
        from workers.model_runner import fingerprint

        try:
            return fingerprint(self.config.engine(str(resolve(self.config.model))))
        except (ValueError, OSError, RuntimeError) as error:
            raise CommandError(str(error)) from error

    def _open(self, fingerprint: str) -> "SampleStore":
        from router.batch.store import Form, SampleStore, StoreError

        job = {
            "input": self.source.digest(),
            "model": fingerprint,
            "seed": self.args.seed,
            "extra": sorted(self.extra),
            "replies": self.replies,
            **self.defaults,
        }
        try:
            form: Form = "parquet" if self.args.format == "parquet" else "jsonl"
            return SampleStore.open(self.args.output, job, form, force=self.args.force)
        except StoreError as error:
            raise CommandError(str(error)) from error

    @property
    def replies(self) -> bool:
        return bool(self.args.format == "openai")

    @property
    def extra(self) -> frozenset[str]:
        return frozenset(name for name in self.args.extra.split(",") if name)

    def _conclude(self, store: "SampleStore") -> int:
        """Write OpenAI's files where they are wanted, print the summary, and choose the exit code."""
        summary = store.summary
        assert summary is not None
        if self.replies and not store.has(ERRORS):
            _write_replies(store, self.args.seed)
        print(json.dumps(summary))
        return SOME_FAILED if summary["failed_rows"] else 0


async def _sample(job: _Job, model: "ModelInfo", store: "SampleStore") -> None:
    """Run the batch until it ends or a signal cancels it. Raises KeyboardInterrupt, CommandError."""
    from deploy.batch_cluster import JobEngine
    from deploy.batch_progress import Status, reporting
    from router.batch.rows import RowReader, RowRules
    from router.batch.runner import BatchError, BatchRunner, RunOptions
    from router.limits import RouterLimits
    from router.serving import Serving

    engine = JobEngine(model)
    await engine.open()
    limits = RouterLimits(max_n=MAX_N, max_children=MAX_CHILDREN)
    rules = RowRules(
        key=str(job.args.seed),
        defaults=job.defaults,
        extra=job.extra,
        replies=job.replies,
        created=store.created,
    )
    runner = BatchRunner(
        engine,
        store,
        RowReader(Serving.load(engine, limits), rules),
        capacity=lambda: max(int(engine.slots * QUEUED), 1),
        pieces=lambda: engine.groups,
        options=RunOptions(look_ahead=job.args.look_ahead),
    )
    try:
        async with reporting(lambda: Status(runner.progress, job.source.fraction)):
            await _cancelled_by_signals(runner.run(job.source.rows()))
    except BatchError as error:
        raise CommandError(f"{error}; run the same command again to continue") from error
    finally:
        await engine.close()


async def _cancelled_by_signals(work: Any) -> Any:
    """The result of `work`, which SIGTERM and Ctrl-C cancel. Raises KeyboardInterrupt then."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _write_replies(store: "SampleStore", seed: int) -> None:
    """The file of errors goes last: where it is, both are whole."""
    from router.batch import replies

    for name, wanted in ((OUTPUT, False), (ERRORS, True)):
        made = replies.lines(store.records(), str(seed))
        store.write_text(
            name, (json.dumps(line, ensure_ascii=False) for line in made if replies.failed(line) is wanted)
        )
