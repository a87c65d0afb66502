"""A completions server without sockets on a clock without waiting: time jumps to the next moment something is due.

Sleeps take exactly the time they name, so a test can ask for equal numbers. Keep moments to sums of powers of two.
"""

import asyncio
import json

import httpx


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only by the timeouts of sleeping tasks."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._wait, self._selector.select = self._selector.select, self._jump

    def _jump(self, timeout):
        assert timeout is not None, "every task waits for another"
        self._now += timeout
        return self._wait(0)

    def time(self):
        return self._now


def run(coroutine):
    """The coroutine's result on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def now():
    """The clock of the running loop."""
    return asyncio.get_running_loop().time()


def chunk(index, text, finish=None):
    """The data of a chunk as servers write it."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


class VirtualServer(httpx.AsyncBaseTransport):
    """Answers a POST with what `script(body)` yields: seconds to wait, events as dictionaries, or bytes as they are.

    `requests` holds (moment, body) of each; `pages` the text of a GET by path, where "" raises a connection error.
    """

    def __init__(self, script=None):
        self.script = script or self.steps
        self.requests = []
        self.status = 200
        self.pages = {}
        self.step_s = 0.25

    def client(self):
        return httpx.AsyncClient(transport=self, base_url="http://server")

    def steps(self, body):
        """All children grow by a token every `step_s`; the first one comes after one."""
        for token in range(body["max_tokens"]):
            yield self.step_s
            for index in range(body["n"]):
                yield chunk(index, " x", "length" if token + 1 == body["max_tokens"] else None)
        yield {"choices": [], "usage": {"completion_tokens": body["n"] * body["max_tokens"]}}
        yield b"data: [DONE]\n\n"

    async def handle_async_request(self, request):
        if request.method == "GET":
            return self._page(request.url.path)
        body = json.loads(await request.aread())
        self.requests.append((now(), body))
        return httpx.Response(self.status, stream=_Stream(self.script(body)))

    def _page(self, path):
        if (text := self.pages.get(path)) == "":
            raise httpx.ConnectError("gone")
        return httpx.Response(404 if text is None else 200, text=text() if callable(text) else text)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, script):
        self.script = script

    async def __aiter__(self):
        for item in self.script:
            if isinstance(item, dict):
                yield b"data: " + json.dumps(item).encode() + b"\n\n"
            elif isinstance(item, bytes):
                yield item
            else:
                await asyncio.sleep(item)
