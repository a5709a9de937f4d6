"""Starts of a real ``anaphora serve`` that must fail: in one line, with the fix, and status 2."""

from __future__ import annotations

import socket

import pytest

from tests.loaders.tiny import CONFIG, random_weights, write_directory
from tests.serving import NO_INDEX, run_command


class TestBadStarts:
    """Exit status 2 and one line that names the value and the fix."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--host", "0.0.0.0"], ["--host 0.0.0.0", "add --api-key"]),
            (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "'lots'", "96MiB or 2GiB"]),
            (["--kv-cache-memory", "99999999TiB"], ["--kv-cache-memory", "at most"]),
            (["--threads", "99999"], ["--threads is 99999", "at most 1024"]),
            (["--kv-cache-memory", "1KiB"], ["1.0 KiB", "raise --kv-cache-memory"]),
            (["--max-model-len", "9000"], ["--max-model-len is 9000", "8192", "lower it"]),
            (["no-such-model"], ["'no-such-model'", "alias (smollm2, gemma3-270m)", ".gguf"]),
            (["./none.gguf"], ["./none.gguf does not exist", "give a .gguf file"]),
        ],
    )
    def test_options(self, tmp_path, smollm2_path, arguments, words):
        check_refusal(run_command(tmp_path, "serve", "--port", "0", *arguments), words)

    def test_a_public_prefix_that_fills_no_block(self, tmp_path, smollm2_path):
        (tmp_path / "short.txt").write_text("Be kind.\n")
        done = run_command(
            tmp_path, "serve", "--port", "0", "--public-prefix", "short.txt", "--block-size", "64"
        )
        check_refusal(done, ["--public-prefix number 1 has", "a block of 64", "leave it out"])

    def test_a_value_that_is_no_choice(self, tmp_path):
        done = run_command(tmp_path, "serve", "--port", "0", "--dtype", "int4")
        assert done.status == 2
        for word in ("--dtype", "int4", "int8", "float32"):
            assert word in done.errors
        assert "Traceback" not in done.errors

    def test_a_temporary_directory_with_a_long_path(self, tmp_path, smollm2_path):
        place = tmp_path / ("x" * 100)
        place.mkdir()
        done = run_command(tmp_path, "serve", "--port", "0", TMPDIR=str(place))
        check_refusal(done, [str(place), "set TMPDIR"])
        assert not list(place.iterdir())

    def test_a_port_in_use(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = run_command(tmp_path, "serve", "--port", str(port))
        check_refusal(done, [f"--port {port}", "choose another --port"])

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda data: data[:-1000], ["truncated", "fetch the file again"]),
            (lambda data: bytes([data[0] ^ 255]) + data[1:], ["is not a GGUF file"]),
            (lambda data: data[:9] + b"\xff" + data[10:], ["damaged", "fetch the file again"]),
        ],
        ids=["cut", "magic", "count"],
    )
    def test_a_damaged_gguf(self, tmp_path, smollm2_path, damage, words):
        data = smollm2_path.read_bytes()[:4_000_000]
        (tmp_path / "broken.gguf").write_bytes(damage(data))
        done = run_command(tmp_path, "serve", "--port", "0", "./broken.gguf")
        check_refusal(done, ["broken.gguf", *words])

    def test_truncated_safetensors(self, tmp_path):
        path = write_directory(tmp_path / "tiny", CONFIG, random_weights(CONFIG))
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        done = run_command(tmp_path, "serve", "--port", "0", "./tiny")
        check_refusal(done, ["model.safetensors", "truncated"])

    def test_a_cache_directory_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").touch()
        place = {"ANAPHORA_CACHE": str(tmp_path / "file")}
        done = run_command(tmp_path, "serve", "--port", "0", **place)
        check_refusal(done, ["file/models cannot be written", "set ANAPHORA_CACHE"])

    def test_offline_without_the_model(self, tmp_path):
        place = {"ANAPHORA_CACHE": str(tmp_path / "cache")}
        done = run_command(tmp_path, "serve", "--port", "0", **place, **NO_INDEX)
        assert done.status == 2
        assert "run `anaphora pull smollm2`" in done.errors
        assert "Traceback" not in done.errors
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def check_refusal(done, words):
    assert (done.status, done.output) == (2, "")
    [line] = [line for line in done.errors.splitlines() if line]
    assert line.startswith("error: ")
    for word in words:
        assert word in line
