"""What the server adds to the engine: overhead, many clients at once, and hours of use in minutes.

Usage: python benchmarks/serving.py overhead|clients|soak [--minutes 30]

- overhead: requests of one token to a model that takes no time, 100 a second, Poisson arrivals.
  What is left is the gateway: HTTP, keys, limits, counters, a usage row in SQLite.
- clients: 500 streams at once on the default model, beside the same prompts in one process without
  a server. The clients are as slim as they can be (sockets, bytes): they share the machine.
- soak: chats, completions, batches, aborts, bad requests, two tenants; every half minute the engine
  is killed, a client stops reading, or the cache is purged. Memory, file descriptors and threads
  are sampled; in the end every token must be accounted for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

MODEL = "smollm2"
NUM_CLIENTS = 500
NUM_PROMPT, NUM_OUTPUT = 64, 64
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
ADMIN = "key-of-admin"
FAKE_SERVER = """
import asyncio, sys
from anaphora.fake import FakeLLM
from anaphora.logs import configure_logging
from anaphora.server.app import create_app
from anaphora.server.listen import bind, build_server, shorten_pauses, url_of
from anaphora.server.store import Store
from anaphora.server.tenants import Tenants

async def main():
    configure_logging("json")
    tenants = Tenants.from_flags(["alice=key-of-alice"])
    store = Store(sys.argv[1])
    app = create_app(FakeLLM(), tenants, store=store)
    sock = bind("127.0.0.1", 0, tenants=tenants)
    server = build_server(app)
    shorten_pauses()
    print(url_of(sock) + "/v1", flush=True)
    server.is_leaving = True  # the first signal ends it
    await server.serve(sockets=[sock])
    app.state.service.close()

asyncio.run(main())
"""
console = Console(width=110)


@contextlib.contextmanager
def process(command: list[str], folder: Path, **environment: str) -> Iterator[tuple[str, int]]:
    """A server's base URL and process id; it ends with the block."""
    path = folder / "log"
    with path.open("w+b") as log:
        child = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        try:
            while not (found := re.search(rb"(http://\S+?)/v1", path.read_bytes())):
                if child.poll() is not None:
                    raise SystemExit(path.read_text())
                time.sleep(0.05)
            yield found[1].decode(), child.pid
        finally:
            child.terminate()
            child.wait(60)


def real_server(folder: Path, *more: str) -> contextlib.AbstractContextManager[tuple[str, int]]:
    command = [sys.executable, "-m", "anaphora", "serve", MODEL, "--port", "0"]
    command += ["--database", str(folder / "a.db"), "--kv-cache-memory", "1GiB", *more]
    keys = ",".join(f"{name}={key}" for name, key in KEYS.items())
    given = {"ANAPHORA_API_KEY": keys, "ANAPHORA_ADMIN_KEY": ADMIN, "COLUMNS": "200"}
    return process(command, folder, **given)


def request_bytes(body: dict[str, object], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['alice']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


Connections = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


async def exchange(
    address: tuple[str, int], request: bytes, end: bytes, idle: Connections | None = None
) -> tuple[float, bytes]:
    """Seconds until ``end`` has come, and all that came; over an ``idle`` connection if any is."""
    start = time.perf_counter()
    is_old = bool(idle)
    reader, writer = idle.pop() if idle else await asyncio.open_connection(*address)
    writer.write(request)
    answer = bytearray()
    while not answer.rstrip().endswith(end):
        data = await reader.read(65536)
        if not data:
            break
        answer += data
    if not answer and is_old:  # closed by the server a while ago
        return await exchange(address, request, end, idle)
    seconds = time.perf_counter() - start
    if idle is None:
        writer.close()
    else:
        idle.append((reader, writer))
    return seconds, bytes(answer)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure_overhead(url: str, rate: float, seconds: float) -> list[float]:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    request = request_bytes(body, "/v1/chat/completions")
    rng, found = random.Random(1), []
    idle: Connections = []  # clients keep their connections

    async def ask() -> None:
        took, answer = await exchange(address_of(url), request, b"}", idle)
        assert b"200 OK" in answer, answer
        found.append(took)

    end = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() < end:
            group.create_task(ask())
            await asyncio.sleep(rng.expovariate(rate))
    return found


def overhead() -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        process([sys.executable, "-c", FAKE_SERVER, f"{name}/a.db"], Path(name)) as (url, _),
    ):
        time.sleep(1)
        asyncio.run(measure_overhead(url, 100, 3))
        runs = [asyncio.run(measure_overhead(url, 100, 20)) for _ in range(3)]
        lines = (Path(name) / "log").read_text().splitlines()
    inside = [json.loads(line)["seconds"] for line in lines if '"seconds"' in line]
    for share in (0.5, 0.99):
        figures = [percentile(run, share) * 1e3 for run in runs]
        console.print(
            f"overhead at 100 requests a second, P{share * 100:.0f}: "
            f"{statistics.median(figures):.1f} ms seen by the client, on the same two cores (runs "
            f"{', '.join(f'{f:.1f}' for f in figures)}), {percentile(inside, share) * 1e3:.1f} ms "
            "in the server"
        )


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(100, 40_000) for _ in range(NUM_PROMPT)] for _ in range(NUM_CLIENTS)]


def in_process() -> float:
    """Output tokens a second without a server."""
    code = (
        "import sys, time, json; from anaphora import LLM, SamplingParams\n"
        f"llm = LLM({MODEL!r}, kv_cache_memory=2**30)\n"
        "prompts = json.load(sys.stdin)\n"
        f"params = SamplingParams(max_tokens={NUM_OUTPUT}, temperature=0, ignore_eos=True)\n"
        "llm.generate(prompts[:8], params)\n"
        "start = time.perf_counter(); llm.generate(prompts[8:], params)\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(prompts()), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return (NUM_CLIENTS - 8) * NUM_OUTPUT / float(done.stdout)


async def many_clients(url: str) -> tuple[float, Counter[str]]:
    requests = [
        request_bytes({"model": MODEL, "prompt": prompt, "max_tokens": NUM_OUTPUT, "stream": True,
                       "temperature": 0, "ignore_eos": True})
        for prompt in prompts()
    ]  # fmt: skip
    outcomes: Counter[str] = Counter()

    async def ask(request: bytes) -> None:
        try:
            async with asyncio.timeout(600):
                _, answer = await exchange(address_of(url), request, b"[DONE]\n\n\r\n0")
        except TimeoutError:
            outcomes["stuck"] += 1
            return
        is_whole = b"[DONE]" in answer and b'"finish_reason":"length"' in answer
        outcomes["whole" if is_whole else "failed"] += 1

    await asyncio.gather(*map(ask, requests[:8]))
    start = time.perf_counter()
    await asyncio.gather(*map(ask, requests[8:]))
    return (NUM_CLIENTS - 8) * NUM_OUTPUT / (time.perf_counter() - start), outcomes


def clients(repeats: int) -> None:
    alone, served = [], []
    for _ in range(repeats):
        alone.append(in_process())
        with tempfile.TemporaryDirectory() as name, real_server(Path(name)) as (url, _):
            rate, outcomes = asyncio.run(many_clients(url))
        served.append(rate)
        outcome = f"{alone[-1]:.0f} tok/s in process, {rate:.0f} served, {dict(outcomes)}"
        console.print(outcome)
    ratio = statistics.median(s / a for s, a in zip(served, alone, strict=True))
    console.print(f"{NUM_CLIENTS} streams at once: {ratio:.1%} of the engine alone")


class Soak:
    """Mixed load with faults for a while."""

    def __init__(self, url: str, pid: int, seconds: float) -> None:
        self.pid = pid
        self.end = time.perf_counter() + seconds
        self.rng = random.Random(3)
        self.http = httpx.AsyncClient(base_url=url, timeout=120)
        self.address = address_of(url)
        self.statuses: Counter[str] = Counter()
        self.samples: list[tuple[float, int, int, int]] = []
        self.batches: list[str] = []
        self.slow_readers: list[asyncio.Task[None]] = []

    @property
    def goes_on(self) -> bool:
        return time.perf_counter() < self.end

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS.get(tenant, ADMIN)}"}

    async def user(self, tenant: str, number: int) -> None:
        rng = random.Random(number)
        system = f"You are assistant {number % 5}. " + "Be brief and kind. " * 20
        while self.goes_on:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Tell me about {rng.randrange(50)}."},
            ]
            body: dict[str, object] = {"model": MODEL, "messages": messages}
            body |= {"max_tokens": rng.randrange(1, 48), "n": rng.choice((1, 1, 1, 2))}
            kind = rng.randrange(10)
            if kind == 0:
                body["temperature"] = 99
            elif kind == 1:
                body["response_format"] = {"type": "json_object"}
            elif kind == 2:
                body["service_tier"] = "flex"
            with contextlib.suppress(httpx.HTTPError):
                if kind in (3, 4, 5):
                    await self.stream(body | {"stream": True}, tenant, leaves=kind == 3)
                else:
                    answer = await self.http.post(
                        "/v1/chat/completions", json=body, headers=self.headers(tenant)
                    )
                    self.statuses[str(answer.status_code)] += 1
            await asyncio.sleep(rng.random() * 0.2)

    async def stream(self, body: dict[str, object], tenant: str, *, leaves: bool) -> None:
        request = self.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=self.headers(tenant)
        )
        async with request as response:
            async for _ in response.aiter_lines():
                if leaves:
                    break
        self.statuses["left" if leaves else f"stream {response.status_code}"] += 1

    async def batch_user(self) -> None:
        while self.goes_on:
            lines = [
                {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
                 "body": {"model": MODEL, "max_tokens": 8, "messages": [
                     {"role": "user", "content": f"Row {i % 7} of the table."}]}}
                for i in range(40)
            ]  # fmt: skip
            content = "\n".join(map(json.dumps, lines)).encode()
            headers = self.headers("bob")
            with contextlib.suppress(httpx.HTTPError):
                file = await self.http.post("/v1/files", data={"purpose": "batch"},
                                            files={"file": content}, headers=headers)  # fmt: skip
                made = await self.http.post("/v1/batches", headers=headers, json={
                    "input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions",
                    "completion_window": "24h"})  # fmt: skip
                self.batches.append(made.json()["id"])
            await asyncio.sleep(20)

    async def faults(self) -> None:
        while self.goes_on:
            await asyncio.sleep(30)
            kind = self.rng.choice(("kill", "slow", "purge", "reset"))
            self.statuses[f"fault: {kind}"] += 1
            if kind == "kill":
                for child in children(self.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            elif kind == "slow":
                self.slow_readers.append(asyncio.create_task(self.read_slowly()))
            elif kind == "purge":
                await self.post("/cache/purge", {"scope": "tenant"}, "alice")
            else:
                await self.post("/cache/purge", {"scope": "all"}, "admin")

    async def post(self, path: str, body: dict[str, object], tenant: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post(path, json=body, headers=self.headers(tenant))

    async def read_slowly(self) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}
        reader, writer = await asyncio.open_connection(*self.address, limit=1024)
        writer.write(request_bytes(body))
        for _ in range(20):
            await reader.read(1)
            await asyncio.sleep(1)
        writer.close()

    async def sample(self) -> None:
        while self.goes_on:
            self.samples.append((time.perf_counter(), *state_of(self.pid)))
            await asyncio.sleep(10)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(self.user("alice" if number % 2 else "bob", number))
            group.create_task(self.batch_user())
            group.create_task(self.faults())
            group.create_task(self.sample())

    async def counters(self) -> Counter[str]:
        answer = await self.http.get("/metrics", headers=self.headers("admin"))
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    async def check(self) -> None:
        """After all has ended: batches complete, blocks free, rows equal counters."""
        headers = self.headers("bob")
        for batch_id in self.batches:
            while True:
                batch = (await self.http.get(f"/v1/batches/{batch_id}", headers=headers)).json()
                if batch["status"] == "completed":
                    break
                await asyncio.sleep(0.5)
            content = await self.http.get(f"/v1/files/{batch['output_file_id']}/content",
                                          headers=headers)  # fmt: skip
            ids = [json.loads(line)["custom_id"] for line in content.text.splitlines()]
            assert sorted(ids, key=int) == [str(i) for i in range(40)], batch_id
        await asyncio.gather(*self.slow_readers)
        admin = self.headers("admin")
        counters = await self.counters()
        while counters["anaphora_num_requests_running"] + counters["anaphora_num_requests_waiting"]:
            await asyncio.sleep(1)
            counters = await self.counters()
        await asyncio.sleep(1)
        counters = await self.counters()
        [sums] = (await self.http.get("/usage?by=", headers=admin)).json()["data"]
        for metric, column in (
            ("anaphora_requests_total", "requests"),
            ("anaphora_prompt_tokens_total", "input_tokens"),
            ("anaphora_cached_prompt_tokens_total", "cached_tokens"),
            ("anaphora_generation_tokens_total", "output_tokens"),
        ):
            assert counters[metric] == sums[column], (metric, counters[metric], sums[column])
        assert counters["anaphora_kv_blocks_used"] == 0, counters["anaphora_kv_blocks_used"]
        console.print(
            f"{sums['requests']:,} requests, {sums['input_tokens']:,} input tokens of which "
            f"{sums['cached_tokens']:,} cached, {sums['output_tokens']:,} output: rows equal "
            f"counters; {len(self.batches)} batches whole; no block held"
        )
        await self.http.aclose()


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state_of(pid: int) -> tuple[int, int, int]:
    """Resident MiB, file descriptors and threads of the server. (The engine touches the memory of
    its cache as that fills, and begins anew whenever it is killed.)"""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) // 1024
    threads = int(status.split("Threads:")[1].split()[0])
    return resident, len(os.listdir(f"/proc/{pid}/fd")), threads


def soak(minutes: float) -> None:
    with tempfile.TemporaryDirectory() as name, real_server(Path(name)) as (url, pid):
        run = Soak(url, pid, minutes * 60)

        async def everything() -> None:
            await run.run()
            await run.check()

        asyncio.run(everything())
        after = state_of(pid)
        log = (Path(name) / "log").read_text()
    console.print(dict(run.statuses))
    for label, part in (("RSS MiB", 1), ("fds", 2), ("threads", 3)):
        values = [sample[part] for sample in run.samples]
        third = max(1, len(values) // 3)
        early = statistics.median(values[third : 2 * third])
        late, end = statistics.median(values[-third:]), after[part - 1]
        console.print(f"{label}: second third {early:g}, last third {late:g}, at the end {end}")
    console.print(f"tracebacks in the log: {log.count('Traceback')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("overhead", "clients", "soak"))
    parser.add_argument("--minutes", type=float, default=30, help="of the soak")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparison of clients")
    options = parser.parse_args()
    if options.part == "soak":
        soak(options.minutes)
    elif options.part == "clients":
        clients(options.repeats)
    else:
        overhead()


if __name__ == "__main__":
    main()
