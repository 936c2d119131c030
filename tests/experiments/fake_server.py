"""A server of completions that only pretends to generate. With a port as its argument, a process of its own."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Send = Callable[[str], None]


def usage(count: int) -> str:
    return json.dumps({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": 7}})


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"text": text}]})


@contextmanager
def fake(answer: Callable[[dict, Send], None], refused: str = "", port: int = 0) -> Iterator[str]:
    """The URL of a server that streams what `answer` sends, unless a request has the field `refused`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "fake"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(400 if refused in body else 200)
            self.end_headers()
            answer(body, lambda data: self.wfile.write(f"data: {data}\n\n".encode()) and None)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def generate(body: dict, send: Send) -> None:
    """One token a chunk, as asked, and usage where that is asked for."""
    for _ in range(body["max_tokens"]):
        send(chunk("a"))
    if "stream_options" in body:
        send(usage(body["max_tokens"]))
    send("[DONE]")


if __name__ == "__main__":
    with fake(generate, port=int(sys.argv[1])):
        time.sleep(60)
