"""Hands a batch command to a Ray cluster as a job, follows its log, and returns its exit code.

Called by `deploy.batch` for `--submit`. Knows Ray's job server, nothing of the batch.
"""

import asyncio
import shlex
import sys
from collections.abc import Sequence

from ray.job_submission import JobStatus, JobSubmissionClient

from deploy.errors import CommandError
from deploy.serve import say


def submit(address: str, command: Sequence[str]) -> int:
    """Run `command` as a job at `address`, Ray's dashboard. Raises CommandError when the cluster does not take it.

    An interrupt ends the following, not the job.
    """
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=shlex.join(command))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(f"{address} takes no job: {str(error).strip().splitlines()[0]}") from error
    say(f"job {job} at {address}; Ctrl-C leaves it running")
    asyncio.run(_follow(client, job))
    return _exit_code(client, job)


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True, file=sys.stdout)


def _exit_code(client: JobSubmissionClient, job: str) -> int:
    info = client.get_job_info(job)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    raise CommandError(f"job {job} ended as {info.status}: {info.message}")
