"""LoRA adapters over a real ``anaphora serve``, with the openai client, as an operator has them."""

from __future__ import annotations

import os
import signal

import openai
import pytest

from tests.models.adapters import write_adapter
from tests.server.running import check_error, wait_until
from tests.serving import TIMEOUT, cached, run_command, serving

ADA, ROOT = "key-of-ada", "key-of-root"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
PROMPT = "The lighthouse keeper climbed the stairs, as every evening, and counted them. " * 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, SMOLLM2, rank=8, seed=seed, size=0.3)
        for seed, name in enumerate(("one", "two", "three"))
    }


@pytest.fixture(scope="module")
def server(smollm2_path, folders, tmp_path_factory):
    arguments = [
        str(smollm2_path), "--served-model-name", "base", "--kv-cache-memory", "64MiB",
        "--swap-space", "64MiB", "--api-key", f"ada={ADA}", "--max-loras", "3",
        "--lora-modules", f"one={folders['one']}", f"two={folders['two']}",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, *arguments, key=ROOT, ANAPHORA_ADMIN_KEY=ROOT) as running:
        yield running


def complete(server, model, prompt=PROMPT, **fields):
    defaults = {"max_tokens": 8, "temperature": 0, "logprobs": 2}
    with server.openai(ADA) as sdk:
        return sdk.completions.create(model=model, prompt=prompt, **(defaults | fields))


def numbers(answer):
    choice = answer.choices[0]
    return choice.text, choice.logprobs.token_logprobs


def call(server, path, key=ROOT, **body):
    with server.http(key) as http:
        return http.post(path, json=body)


def test_it_says_what_it_serves(server):
    for words in ("base, one, two", "2 loaded, up to 3 of rank 64"):
        assert words in server.output
    with server.openai(ADA) as sdk:
        parents = {model.id: model.parent for model in sdk.models.list()}
    assert parents == {"base": None, "one": "base", "two": "base"}


def test_adapters_are_models_that_share_nothing(server):
    cold = {name: complete(server, name) for name in ("base", "one", "two")}
    assert len({numbers(answer)[1][0] for answer in cold.values()}) == 3
    for name, answer in cold.items():
        assert cached(answer.usage) == 0
        warm = complete(server, name)
        assert cached(warm.usage) > 0
        assert numbers(warm) == numbers(answer)
    with server.http(ADA) as http:
        body = {"model": "base", "prompt": "Another beginning. " + PROMPT, "max_tokens": 1}
        http.post("/v1/completions", json=body)
        other = http.post("/v1/completions", json=body | {"model": "one"})
    assert "reason=other_adapter" in other.headers["x-anaphora-cache"]


def test_loading_and_unloading_at_run_time(server, folders):
    with server.openai(ADA) as sdk:
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="three", prompt="x")
        assert call(server, LOAD, ADA, lora_name="three", lora_path="/x").status_code == 403
        path = str(folders["three"])
        assert call(server, LOAD, lora_name="three", lora_path=path).status_code == 200
        before = numbers(complete(server, "three"))
        assert before != numbers(complete(server, "base"))
        # A stream that runs ends with the weights it began with.
        stream = sdk.completions.create(
            model="three", prompt=PROMPT, max_tokens=60, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        assert call(server, UNLOAD, lora_name="three").status_code == 200
        with pytest.raises(openai.NotFoundError, match="'three', which is not served"):
            sdk.completions.create(model="three", prompt="x")
        text += "".join(chunk.choices[0].text for chunk in stream)
        server.wait_idle()
        assert call(server, LOAD, lora_name="three", lora_path=path).status_code == 200
        again = complete(server, "three", max_tokens=60)
        assert cached(again.usage) == 0  # purged, also what the stream computed afterwards
        assert again.choices[0].text == text
    assert call(server, UNLOAD, lora_name="three").status_code == 200


def test_what_cannot_be_loaded(server, folders, tmp_path):
    def refused(name, path, **more):
        return check_error(call(server, LOAD, lora_name=name, lora_path=str(path), **more), 400)

    other = write_adapter(tmp_path / "other", SMOLLM2 | {"hidden_size": 64})
    assert "has shape" in refused("x", other)["message"]
    high = write_adapter(tmp_path / "high", SMOLLM2, rank=65, targets=("q_proj",))
    assert "--max-lora-rank, which is 64" in refused("x", high)["message"]
    cut = write_adapter(tmp_path / "cut", SMOLLM2, targets=("q_proj",))
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "truncated" in refused("x", cut)["message"]
    for path in (tmp_path / "none", "/etc", "/root", "/etc/passwd", "../../etc", "/dev"):
        assert "no readable adapter_config.json" in refused("x", path)["message"]
    assert refused("base", folders["three"])["param"] == "lora_name"
    assert refused("one", folders["three"])["param"] == "lora_name"
    assert call(server, LOAD, lora_name="x", lora_path=str(folders["one"])).status_code == 200
    assert "--max-loras is 3" in refused("y", folders["one"])["message"]
    assert call(server, UNLOAD, lora_name="x").status_code == 200
    assert numbers(complete(server, "one"))[0]  # and "one", of the same weights, is still there


def test_replaced_in_place(server, folders):
    one = numbers(complete(server, "one"))
    body = {"lora_name": "one", "lora_path": str(folders["three"]), "load_inplace": True}
    assert call(server, LOAD, **body).status_code == 200
    replaced = complete(server, "one")
    assert cached(replaced.usage) == 0
    assert numbers(replaced) != one
    body["lora_path"] = str(folders["one"])
    assert call(server, LOAD, **body).status_code == 200
    back = complete(server, "one")
    assert cached(back.usage) == 0
    assert numbers(back) == one


def test_a_replaced_engine_has_the_same_adapters(server, folders):
    """Those loaded at start and later; one that has gone from the disk is given up, and no more."""
    path = write_adapter(folders["three"].parent / "gone", SMOLLM2, rank=2, targets=("v_proj",))
    assert call(server, LOAD, lora_name="gone", lora_path=str(path)).status_code == 200
    before = {name: numbers(complete(server, name)) for name in ("base", "one", "two", "gone")}
    (path / "adapter_model.safetensors").unlink()
    pid = server.engine_pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.engine_pid not in (None, pid), seconds=TIMEOUT)

    def is_up():
        with server.http() as http:
            return http.get("/ready").status_code == 200

    wait_until(is_up, seconds=TIMEOUT)
    for name in ("base", "one", "two"):
        answer = complete(server, name)
        assert cached(answer.usage) == 0
        assert numbers(answer) == before[name]
    with pytest.raises(openai.NotFoundError):
        complete(server, "gone")
    assert "adapter gone is not loaded again" in server.errors
    assert server.metric("lora_adapters") == 2


class TestBadStarts:
    """Exit status 2 and one line that names the fault."""

    def refused(self, tmp_path, smollm2_path, *arguments):
        done = run_command(tmp_path, "serve", str(smollm2_path), "--port", "0", *arguments)
        assert done.status == 2
        assert "Traceback" not in done.errors
        [line] = [line for line in done.errors.splitlines() if line]
        return line

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--lora-modules", "x=none"], "--lora-modules x: none has no readable adapter_config"),
            (["--lora-modules", "none"], "write NAME=PATH"),
            (["--lora-modules", "a=x", "a=y"], "'a' twice"),
            (["--lora-modules", "a=x", "b=y", "--max-loras", "1"], "--max-loras is 1"),
            (["--max-loras", "-1"], "--max-loras is -1"),
            (["--max-lora-rank", "0"], "--max-lora-rank is 0"),
        ],
    )
    def test_options(self, tmp_path, smollm2_path, arguments, words):
        assert words in self.refused(tmp_path, smollm2_path, *arguments)

    def test_an_adapter_of_another_model(self, tmp_path, smollm2_path):
        write_adapter(tmp_path / "other", SMOLLM2 | {"num_hidden_layers": 31})
        line = self.refused(tmp_path, smollm2_path, "--lora-modules", "x=other")
        assert "layers.30." in line
        assert "has no place" in line

    def test_a_name_of_the_model(self, tmp_path, smollm2_path, folders):
        line = self.refused(
            tmp_path, smollm2_path, "--served-model-name", "m", "--lora-modules",
            f"m={folders['one']}",
        )  # fmt: skip
        assert "'m', which is a name of the model" in line
