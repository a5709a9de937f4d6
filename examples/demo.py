"""Shows a miss and a hit: serves the default model, asks several questions about one handbook.

Every question begins with the same system prompt. The first request computes it, the others find
it in the cache. Exits with status 1 if a hit was not faster than the miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

MODEL = "smollm2"
HANDBOOK = Path(__file__).with_name("handbook.txt")
QUESTIONS = [
    "When does the last train leave Summit?",
    "What does a day pass cost, and where is it valid?",
    "May I take my dog and my bicycle?",
    "I lost an umbrella on the train. What should I do?",
]
START_SECONDS = 120.0


@dataclasses.dataclass
class Answer:
    """What one request gave, with times in seconds."""

    text: str
    logprobs: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    ttft: float
    total: float

    @property
    def time_per_output_token(self) -> float:
        """Seconds between two tokens after the first."""
        return (self.total - self.ttft) / max(1, self.num_tokens - 1)


@contextlib.contextmanager
def serving(console: Console) -> Iterator[str]:
    """The base URL of a server that lives as long as the block."""
    command = [sys.executable, "-m", "anaphora", "serve", MODEL, "--port", "0"]
    command += ["--database", "memory"]  # one of yours may need a key
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            with console.status("loading the model"):
                url = wait_for_url(server, log)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_for_url(server: subprocess.Popen[bytes], log) -> str:
    """The URL that the server prints once it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read())
        if found:
            return found[0]
        time.sleep(0.05)
    log.seek(0)
    raise SystemExit(f"the server did not start:\n{log.read()}")


def ask(client: httpx.Client, system: str, question: str, **more: str) -> Answer:
    """One streamed chat request; ``more`` are further fields of its body."""
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    } | more
    text, logprobs, first, usage = "", [], None, {}
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                first = first or time.perf_counter()
                text += choice["delta"].get("content") or ""
                if choice["logprobs"]:
                    logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
    return Answer(
        text=text,
        logprobs=logprobs,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_tokens=usage["completion_tokens"],
        ttft=(first or time.perf_counter()) - start,
        total=time.perf_counter() - start,
    )


def show(console: Console, answers: list[Answer]) -> None:
    """The table of all requests."""
    table = Table(
        title=f"One handbook, {len(answers)} questions", title_justify="left", show_lines=True
    )
    table.add_column("request", min_width=14)
    for name in ("prompt\ntokens", "cached\ntokens", "TTFT", "time per\ntoken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer begins", min_width=14)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        table.add_row(
            question,
            str(answer.num_prompt_tokens),
            str(answer.num_cached_tokens),
            f"{answer.ttft * 1000:,.0f} ms",
            f"{answer.time_per_output_token * 1000:.1f} ms",
            textwrap.shorten(answer.text, 36, placeholder=" …"),
        )
    console.print(table)


def hit_rate(client: httpx.Client) -> float:
    """Share of prompt tokens that were found in the cache, from /metrics."""
    response = client.get("/metrics")
    response.raise_for_status()
    for family in text_string_to_metric_families(response.text):
        if family.name == "vllm:gpu_prefix_cache_hit_rate":
            return family.samples[0].value
    raise SystemExit("/metrics has no vllm:gpu_prefix_cache_hit_rate")


def main() -> None:
    """Serve, ask, show, judge."""
    console = Console()
    pulled = subprocess.run([sys.executable, "-m", "anaphora", "pull", MODEL], check=False)
    if pulled.returncode:
        raise SystemExit(pulled.returncode)
    system = HANDBOOK.read_text()
    with serving(console) as url, httpx.Client(base_url=url, timeout=120) as client:
        with console.status("asking"):
            ask(client, "You are brief.", "Say hello.")  # warm-up: pages, not the handbook
            answers = [ask(client, system, question) for question in QUESTIONS]
            rate = hit_rate(client)
            # A salt that nobody used before: nothing of the prompt can be found.
            uncached = ask(client, system, QUESTIONS[-1], cache_salt=secrets.token_hex(16))
        show(console, answers)
        console.print(f"hit rate from /metrics: {rate:.1%} of all prompt tokens")
    miss, hits = answers[0], answers[1:]
    hit_ttft = statistics.median(hit.ttft for hit in hits)
    is_same = (uncached.text, uncached.logprobs) == (hits[-1].text, hits[-1].logprobs)
    console.print(
        "the last question once more, nothing cached: same answer, same log-probabilities to the "
        f"last digit: {'yes' if is_same else 'NO'}"
    )
    console.print(
        f"a hit's first token came {miss.ttft / hit_ttft:.1f} times sooner than the miss's"
    )
    if not is_same or uncached.num_cached_tokens:
        raise SystemExit("a hit's answer differs from that of a miss")
    if miss.num_cached_tokens or not all(hit.num_cached_tokens for hit in hits):
        raise SystemExit("expected one miss and then hits; see the column cached")
    if hit_ttft >= miss.ttft:
        raise SystemExit("a hit was not faster than the miss")


if __name__ == "__main__":
    main()
