"""OpenVINO GenAI behind OpenAI's completions: ``openvino_server.py MODEL PORT [NAME=VALUE ...]``.

It has no server of its own; this is the least that lets the same client measure it: continuous
batching in one thread, one thread for each connection, token ids in, streamed text out. Pairs are
properties of the CPU plugin.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

CACHE_GB = 2
NUM_BATCHED_TOKENS = 2048
MODEL = "openvino"


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = NUM_BATCHED_TOKENS
        self._pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._new: queue.SimpleQueue[tuple[list[int], int, queue.SimpleQueue[str | None]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, prompt: list[int], num_tokens: int) -> queue.SimpleQueue[str | None]:
        """The texts of exactly ``num_tokens`` tokens as they come, then None."""
        texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._new.put((prompt, num_tokens, texts))
        return texts

    def _run(self) -> None:
        running: dict[int, tuple[Any, queue.SimpleQueue[str | None]]] = {}
        request_id = 0
        while True:
            while not running or not self._new.empty():
                prompt, num_tokens, texts = self._new.get()
                config = genai.GenerationConfig()
                config.max_new_tokens = num_tokens
                config.ignore_eos = True
                config.do_sample = False
                tensor = openvino.Tensor(np.array([prompt], np.int64))
                handle = self._pipeline.add_request(request_id, tensor, config)
                running[request_id] = (handle, texts)
                request_id += 1
            self._pipeline.step()
            for key, (handle, texts) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            texts.put(self._tokenizer.decode([token]) or "\ufffd")
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    texts.put(None)
                    del running[key]


class Handler(BaseHTTPRequestHandler):
    """``GET /v1/models`` and ``POST /v1/completions`` with ``stream``."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Engine

    def do_GET(self) -> None:
        """The one model."""
        body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """A stream of events."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = self.engine.generate(body["prompt"], body["max_tokens"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        head = {"id": "0", "object": "text_completion", "created": int(time.time()), "model": MODEL}
        num_tokens = 0
        while (text := texts.get()) is not None:
            num_tokens += 1
            reason = "length" if num_tokens == body["max_tokens"] else None
            self._send(head | {"choices": [{"index": 0, "text": text, "finish_reason": reason}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        self._send(head | {"choices": [], "usage": usage})
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, chunk: dict[str, Any]) -> None:
        event = f"data: {json.dumps(chunk)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def log_message(self, *_: object) -> None:
        """Nothing for each request."""


class Server(ThreadingHTTPServer):
    """Room for all streams to connect at once."""

    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    """Serves until it is killed."""
    model, port, *pairs = sys.argv[1:]
    Handler.engine = Engine(model, dict(pair.split("=") for pair in pairs))
    print("listening", flush=True)
    Server(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
