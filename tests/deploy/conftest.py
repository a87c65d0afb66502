"""A small HTTP server that speaks the streamed protocol from a script, in threads of the test process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class ScriptedServer(ThreadingHTTPServer):
    """Plays `script(body)` to every POST: a string is sent as it is, a dictionary as one event.

    With a `status` other than 200 the first item of the script is the JSON reply.
    """

    daemon_threads = True
    status = 200
    model = "tiny"
    seed = 77
    done = "data: [DONE]\n\n"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = self.echo
        self.requests = []
        self.streaming = threading.Event()
        self.hung_up = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def chunk(self, index, text, tokens, finish=None, **more):
        """One chat chunk with the running token count of its choice."""
        choice = {
            "index": index,
            "sample": index,
            "delta": {"content": text},
            "finish_reason": finish,
            **more,
        }
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        return {"id": "chatcmpl-1", "model": self.model, "choices": [choice], "usage": usage}

    def role(self, index):
        """The chunk that introduces a choice; the first one of a stream carries the seed."""
        event = self.chunk(index, "", 0)
        event["choices"][0]["delta"]["role"] = "assistant"
        return event | ({"seed": self.seed} if index == 0 else {})

    def total(self, tokens):
        """The usage chunk at the end."""
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        return {"id": "chatcmpl-1", "model": self.model, "choices": [], "usage": usage}

    def echo(self, body):
        """Child i says `one i`, then `two i`, the last child first; child 0 stops, the others run out."""
        indices = range(body.get("n") or len(body["samples"]))
        for index in indices:
            yield self.role(index)
        for index in reversed(indices):
            yield self.chunk(index, f"one {index}\n", 2)
        yield ": keep-alive\n\n"
        for index in reversed(indices):
            yield self.chunk(index, f"two\u2028{index}", 4, "length" if index else "stop")
        yield self.total(4 * len(indices))
        yield self.done

    def endless(self, body):
        """Grows child 0 until the reader hangs up."""
        yield self.role(0)
        tokens = 0
        while True:
            tokens += 1
            yield self.chunk(0, "more ", tokens)
            self.hung_up.wait(0.01)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._json(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.server.status != 200:
            self._json(self.server.status, next(iter(self.server.script(body))))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in self.server.script(body):
                data = event if isinstance(event, str) else self._event(event)
                self.wfile.write(data.encode())
                self.server.streaming.set()
        except OSError:
            self.server.hung_up.set()

    def _event(self, value):
        return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

    def _json(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ScriptedServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()
