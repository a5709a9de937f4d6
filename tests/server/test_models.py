from __future__ import annotations

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from anaphora.errors import ConfigError
from anaphora.fake import FakeLLM
from anaphora.server.app import create_app
from anaphora.server.tenants import Tenants
from tests.server.running import HELLO, Serve, check_error


def test_models_go_by_all_their_names(serve: Serve) -> None:
    server = serve(served_model_names=["org/model", "alias"])
    with server.openai() as sdk:
        assert [model.id for model in sdk.models.list()] == ["org/model", "alias"]
        model = sdk.models.retrieve("org/model")
        assert model.owned_by == "anaphora"
        assert (model.model_extra or {})["info"]["vocab_size"] == server.llm.info.vocab_size
        answer = sdk.completions.create(model="alias", prompt="a")
        assert answer.model == "alias"
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.models.retrieve("fake")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("names", [["a", "a"], [""]])
def test_names_must_be_usable(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        create_app(FakeLLM(), Tenants.from_flags([]), served_model_names=names)


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    body = {"prompt": "a<|im_end|>é", "return_token_strs": True}
    assert http.post("/tokenize", json=body).json() == {
        "count": 5,
        "max_model_len": 4096,
        "tokens": [256, 97, 258, 0xC3, 0xA9],
        "token_strs": ["<|begin_of_text|>", "a", "<|im_end|>", "\ufffd", "\ufffd"],
    }
    body = {"model": "fake", "prompt": "a", "add_special_tokens": False}
    assert http.post("/tokenize", json=body).json()["tokens"] == [97]
    text = http.post("/detokenize", json={"tokens": [97, 258, 0xC3, 0xA9]}).json()
    assert text == {"prompt": "a<|im_end|>é"}


def test_tokenize_sees_a_chat_as_the_completion_does(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        bare = {"messages": HELLO, "add_generation_prompt": False}
        assert len(http.post("/tokenize", json=bare).json()["tokens"]) < len(tokens)
        http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO})
    assert server.llm.requests[0].prompt_token_ids == tokens


def test_a_base_model_refuses_chats(serve: Serve) -> None:
    llm = FakeLLM()
    llm.chat_template = None
    with serve(llm=llm).http() as http:
        response = http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO})
    assert check_error(response, 400)["param"] == "messages"


def test_metrics_parse_and_count_in_tokens(serve: Serve) -> None:
    server = serve()
    with server.http() as http:
        for _ in range(2):
            body = {"model": "fake", "messages": HELLO, "n": 2, "max_tokens": 4}
            usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        http.get("/nowhere")
        server.llm.die()
        text = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    terms = "fake", "interactive"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert values["anaphora_prefix_cache_queries_total",] == 2 * usage["prompt_tokens"]
    assert values["anaphora_prefix_cache_hits_total",] == cached > 0
    rate = cached / (2 * usage["prompt_tokens"])
    assert values["vllm:gpu_prefix_cache_hit_rate",] == rate
    assert values["vllm:cpu_prefix_cache_hit_rate",] == 0
    assert families["vllm:gpu_prefix_cache_hit_rate"].type == "gauge"
    assert values["anaphora_prompt_tokens_total", *terms] == 2 * usage["prompt_tokens"]
    assert values["anaphora_cached_prompt_tokens_total", *terms] == cached
    assert values["anaphora_generation_tokens_total", *terms] == 16
    assert values["anaphora_choices_total", "length"] == 4
    assert values["anaphora_http_responses_total", "/v1/chat/completions", "200"] == 2
    assert values["anaphora_http_responses_total", "404", "none"] == 1
    assert values["anaphora_time_to_first_token_seconds_count",] == 2
    assert values["anaphora_inter_token_latency_seconds_count",] == 12
    assert values["anaphora_engine_up",] == 0
    assert all(
        family.documentation for family in families.values() if "_created" not in family.name
    )


def test_two_apps_do_not_share_counters() -> None:
    for _ in range(2):  # a shared registry would refuse the second
        create_app(FakeLLM(), Tenants.from_flags([]))


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert "ChatMessage" in description["components"]["schemas"]


def test_every_answer_carries_its_own_request_id(http: httpx.Client) -> None:
    paths = ["/health", "/v1/models", "/nowhere", "/v1/models/none", "/v1/completions"]
    ids = {http.get(path).headers["x-request-id"] for path in paths}
    assert len(ids) == len(paths)
