"""``anaphora bench`` as its users run it, with a tiny model behind it."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import tempfile

import pytest
from rich.console import Console

from anaphora.bench.hitrate import SHARES, Sizes
from anaphora.bench.profile import profile_decode
from anaphora.bench.run import NAMES, BenchOptions, run
from anaphora.errors import ConfigError, MeasurementError
from anaphora.fake import FakeLLM
from tests.loaders.tiny import CONFIG, random_weights, write_directory
from tests.server.running import serving, wait_until
from tests.serving import COMMAND, TIMEOUT, children, environment, is_alive, run_command

FEW = Sizes(num_closed=4, num_clients=2, num_alone=2, num_open=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = CONFIG | {"max_position_embeddings": 4096}
    return write_directory(
        tmp_path_factory.mktemp("bench") / "tiny", config, random_weights(config)
    )


def test_our_own_server(tiny, tmp_path):
    names = ["prefill-512", "decode-1", "shared16"]
    chosen = [word for name in names for word in ("--workload", name)]
    done = run_command(
        tmp_path, "bench", str(tiny), "--repeats", "1", "--kv-cache-memory", "32MiB", *chosen
    )
    assert done.status == 0, done.errors
    *table, last = done.output.splitlines()
    document = json.loads(last)
    figures = document["figures"]
    assert [f["workload"] for f in figures] == [*names, "shared16", "shared16"]
    assert all(f["median"] > 0 and len(f["samples"]) == 1 for f in figures)
    assert [f["cached_share"] for f in figures][:3] == [0, 0, 0]
    assert figures[3]["cached_share"] > 0.5
    assert figures[0]["limit"] > figures[0]["median"]
    assert document["info"]["num_multiplied_weights"] == 2 * (64 * 64 * 3 + 3 * 64 * 96)
    assert document["info"]["num_head_weights"] == 800 * 64
    assert document["hit_rate"] is None
    assert any("decode-1" in line for line in table)


def test_a_wrong_workload_is_status_2_with_the_list(tmp_path):
    done = run_command(tmp_path, "bench", "--workload", "nonsense")
    assert (done.status, done.output) == (2, "")
    for name in ("nonsense", *NAMES):
        assert name in done.errors


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"repeats": 0}, "--repeats is 0"),
        ({"served_model": "m"}, "--model is m"),
        ({"url": "http://127.0.0.1:1", "model": "other"}, "MODEL is other"),
        ({"url": "http://127.0.0.1:1", "dtype": "float32"}, "--dtype is float32"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        BenchOptions(**options)


def test_a_run_that_is_told_to_end_leaves_no_server(tiny, tmp_path):
    with tempfile.TemporaryDirectory(prefix="a-") as temporary:
        arguments = [str(tiny), "--kv-cache-memory", "32MiB", "--repeats", "999"]
        process = subprocess.Popen(
            [COMMAND, "bench", *arguments, "--workload", "prefill-512"],
            env=environment(temporary, {}),
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: bool(children(process.pid)), seconds=TIMEOUT)
        [server] = children(process.pid)
        wait_until(lambda: bool(children(server)), seconds=TIMEOUT)
        [engine] = children(server)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
        wait_until(lambda: not (is_alive(server) or is_alive(engine)), seconds=TIMEOUT)


def test_a_server_that_is_not_there_is_status_1(tmp_path):
    done = run_command(tmp_path, "bench", "--url", "http://127.0.0.1:1/v1")
    assert (done.status, done.output) == (1, "")
    assert "GET http://127.0.0.1:1/v1/models" in done.errors


def test_a_server_somewhere():
    """Its own unseen prompts are the baseline, and nobody knows its machine's limits."""
    with serving() as serve:
        server = serve("key", llm=FakeLLM(token_delay=0.0005))
        options = BenchOptions(
            url=f"{server.url}/v1",
            api_key="key",
            workloads=("hot-2048", "hit-rate"),
            repeats=1,
            seed=5,
            sizes=FEW,
        )
        report = asyncio.run(run(options))
        with pytest.raises(MeasurementError, match="cached tokens; was this server measured"):
            asyncio.run(run(options))
    document = json.loads(report.to_json())
    assert document["peaks"] is None
    assert {f["limit"] for f in document["figures"]} == {None}
    shares = document["hit_rate"]["shares"]
    assert set(map(float, shares)) == set(SHARES)
    for share, found in shares.items():
        assert found["samples"][0]["cached_share"] == pytest.approx(float(share))
    assert shares["0"]["gain"]["throughput"] == 1
    output = io.StringIO()
    report.show(Console(file=output, width=200))
    assert "caching off" not in output.getvalue()


def test_the_profile_accounts_for_the_whole_step(tiny):
    profile = profile_decode(BenchOptions(model=str(tiny), repeats=1, kv_cache_memory="32MiB"))
    document = json.loads(profile.to_json())
    assert [step["batch_size"] for step in document["decode_steps"]] == [1, 8]
    for step in document["decode_steps"]:
        assert sum(step["parts"].values()) == pytest.approx(step["clocked_step"], rel=0.1)
        assert step["kernels"] + step["outside"] == pytest.approx(step["step"])
        assert {"kernel: linear", "sampling", "messages: encode"} <= set(step["parts"])
    assert document["decode_steps"][0]["served_step"] > 0  # eight tiny streams may never meet
    with pytest.raises(ConfigError, match="--url"):
        profile_decode(BenchOptions(url="http://127.0.0.1:1"))
