"""A real ``anaphora serve`` over the real model, seen from outside: HTTP, signals, /proc, files."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time

import numpy as np
import openai
import pytest

from tests.loaders.tiny import CONFIG, random_weights, write_directory
from tests.server.running import check_error, wait_until
from tests.serving import NO_INDEX, TIMEOUT, cached, children, is_alive, serving

CANARY = "canary-7d21"
ADA, BEN = f"{CANARY}-ada", f"{CANARY}-ben"
MODEL = "smollm2"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCABULARY = 49152
CACHE_TOKENS = 5648  # what 128 MiB hold; less than the model's 8192


@pytest.fixture(scope="module")
def server(smollm2_path, tmp_path_factory):
    arguments = [str(smollm2_path), "--served-model-name", MODEL, "--kv-cache-memory", "128MiB"]
    # It is full for most of the tests, and they ask for what was asked a moment ago.
    arguments += ["--eviction-policy", "lru"]
    keys = ["--api-key", f"ada={ADA}", "--api-key", f"ben={BEN}"]
    with serving(tmp_path_factory.mktemp("serve"), *arguments, *keys, key=ADA) as running:
        yield running


@pytest.fixture
def sdk(server):
    with server.openai() as client:
        yield client


def messages(topic, length=40):
    """A chat that shares no block with another topic's: the difference comes first."""
    system = f"{topic} is what you talk about. " + "Answer briefly and in good spirits. " * 2
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Tell me about {topic}. " + "It matters. " * length},
    ]


def token_ids(seed, length):
    return np.random.default_rng(seed).integers(100, 40_000, length).tolist()


def chat(sdk, topic, **fields):
    defaults = {"model": MODEL, "messages": messages(topic), "max_tokens": 8, "temperature": 0}
    defaults |= {"logprobs": True, "top_logprobs": 5}
    return sdk.chat.completions.create(**(defaults | fields))


def complete(sdk, topic, **fields):
    prompt = messages(topic)[1]["content"]
    defaults = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 5}
    return sdk.completions.create(**(defaults | fields))


def numbers(choice):
    """All that a choice says, with every digit of its log-probabilities."""
    lists = choice.logprobs.model_dump()
    assert lists.get("content") or lists["token_logprobs"]
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return text, choice.finish_reason, lists


def joined(stream):
    """A stream's text, its logprobs as in the whole answer, and its usage."""
    text, entries, lists = "", [], {}
    for chunk in stream:
        for choice in chunk.choices:
            logprobs = choice.logprobs.model_dump() if choice.logprobs else {}
            if chunk.object == "chat.completion.chunk":
                text += choice.delta.content or ""
                entries += logprobs.get("content") or []
            else:
                text += choice.text
                for name, values in logprobs.items():
                    lists[name] = lists.get(name, []) + values
    return text, entries or lists, chunk.usage


def test_it_says_what_it_serves(server):
    """Effective settings, and the cache's size, are in front of the operator."""
    for words in ("128.0 MiB", f"{CACHE_TOKENS:,} tokens", "prefix caching │ on", MODEL, "/v1"):
        assert words in server.output


ROUTES = pytest.mark.parametrize("ask", [chat, complete])


class TestHits:
    """What a hit may change is the time, and nothing else."""

    @ROUTES
    def test_a_hit_equals_a_miss_in_every_digit(self, sdk, ask):
        cold, warm = ask(sdk, "the sea"), ask(sdk, "the sea")
        assert numbers(warm.choices[0]) == numbers(cold.choices[0])
        assert cached(cold.usage) == 0
        assert cached(warm.usage) == (warm.usage.prompt_tokens - 1) // 16 * 16 > 0
        assert warm.usage.prompt_tokens == cold.usage.prompt_tokens

    @ROUTES
    def test_a_stream_equals_the_whole_answer_and_reports_its_hit(self, sdk, ask):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        cold, warm = joined(ask(sdk, "a river", **options)), joined(ask(sdk, "a river", **options))
        assert warm[:2] == cold[:2]
        assert cached(cold[2]) == 0
        assert cached(warm[2]) == (warm[2].prompt_tokens - 1) // 16 * 16 > 0
        whole = ask(sdk, "a river")
        assert whole.usage == warm[2]
        text, _, lists = numbers(whole.choices[0])
        assert warm[0] == text
        assert warm[1] == (lists.get("content") or lists)

    @ROUTES
    def test_strangers_change_no_digit(self, server, sdk, ask):
        """Cold and warm, each beside eight others that arrive at the same time."""
        alone = numbers(ask(sdk, "a lake").choices[0])

        async def crowd(number, **fields):
            async with server.async_openai() as client:
                strangers = [
                    ask(client, f"{number}, {i} hills", max_tokens=4 + i) for i in range(8)
                ]
                mine, *_ = await asyncio.gather(ask(client, "a lake", **fields), *strangers)
            return mine

        warm = asyncio.run(crowd(1))
        cold = asyncio.run(crowd(2, extra_body={"cache_salt": "as cold as at first"}))
        assert cached(warm.usage) > cached(cold.usage) == 0
        assert numbers(warm.choices[0]) == numbers(cold.choices[0]) == alone

    def test_seeded_choices_are_the_same_alone_and_in_a_crowd(self, server, sdk):
        sampled = {"n": 2, "seed": 11, "temperature": 1.0, "max_tokens": 12}
        alone = [numbers(choice) for choice in chat(sdk, "a wood", **sampled).choices]
        assert alone[0] != alone[1]

        async def crowd():
            async with server.async_openai() as client:
                strangers = [chat(client, f"{i} trees", temperature=1.0, n=2) for i in range(4)]
                mine, *_ = await asyncio.gather(chat(client, "a wood", **sampled), *strangers)
            return mine

        assert [numbers(choice) for choice in asyncio.run(crowd()).choices] == alone

    def test_a_hit_answers_in_a_tenth_of_the_time(self, sdk):
        prompt = token_ids(1, 2048)

        def time_to_first_token():
            started = time.perf_counter()
            with sdk.completions.create(
                model=MODEL, prompt=prompt, max_tokens=1, stream=True
            ) as stream:
                next(iter(stream))
            return time.perf_counter() - started

        miss = time_to_first_token()
        best_hit = min(time_to_first_token() for _ in range(4))
        assert best_hit < miss / 10


class TestAccounts:
    """``cached_tokens`` is what was really skipped, in every path, and the counters agree."""

    @pytest.mark.parametrize("repeat", [False, True], ids=["cold", "warm"])
    def test_cached_tokens_are_those_that_were_not_computed(self, server, sdk, repeat):
        topic = f"{repeat} numbers"
        if repeat:
            complete(sdk, topic)
        before = server.wait_idle()
        usage = complete(sdk, topic).usage
        computed = server.wait_idle()["anaphora_computed_tokens_total"]
        computed -= before["anaphora_computed_tokens_total"]
        # the last token is never fed back
        assert computed == usage.prompt_tokens - cached(usage) + usage.completion_tokens - 1
        assert (cached(usage) > 0) == repeat

    def test_every_path_reports_what_the_counters_count(self, server, sdk):
        before = server.wait_idle()
        topic = {"prompt": messages("counting")[1]["content"] * 2}
        usages = [complete(sdk, "", **topic).usage]
        usages += [complete(sdk, "", **topic, n=3, temperature=1.0).usage]
        usages += [complete(sdk, "", **topic, stop=[" "], max_tokens=50).usage]
        usages += [complete(sdk, "", prompt=[topic["prompt"]] * 2).usage]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        usages += [joined(complete(sdk, "", **topic, **options))[2]]
        usages += [chat(sdk, "counting").usage, chat(sdk, "counting", n=2).usage]
        usages += [joined(chat(sdk, "counting", **options))[2]]
        after = server.wait_idle()
        prompts = sum(usage.prompt_tokens for usage in usages)
        hits = sum(map(cached, usages))
        assert [cached(usage) > 0 for usage in usages] == [False] + [True] * 4 + [False] + [
            True
        ] * 2
        for name, expected in (
            ("prefix_cache_queries_total", prompts),
            ("prefix_cache_hits_total", hits),
            ("prompt_tokens_total", prompts),
            ("cached_prompt_tokens_total", hits),
            ("generation_tokens_total", sum(usage.completion_tokens for usage in usages)),
        ):
            assert after[f"anaphora_{name}"] - before[f"anaphora_{name}"] == expected, name

    def test_an_abandoned_stream_counts_what_it_got(self, server, sdk):
        before = server.wait_idle()
        stream = complete(
            sdk, "", prompt=token_ids(5, 33), stream=True, max_tokens=4000,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
        after = server.wait_idle()
        changes = {name: after[name] - value for name, value in before.items()}
        assert changes["anaphora_prompt_tokens_total"] == 33
        assert changes["anaphora_prefix_cache_queries_total"] == 33
        assert 1 <= changes["anaphora_generation_tokens_total"] < 4000
        assert sum(v for name, v in changes.items() if "anaphora_choices_total" in name) == 0

    def test_a_prompt_that_is_sent_twice_in_one_request_is_computed_once(self, sdk):
        prompt = token_ids(2, 100)
        usage = complete(sdk, "", prompt=[prompt, prompt]).usage
        assert (usage.prompt_tokens, cached(usage)) == (200, 96)


class TestTenants:
    def test_another_key_finds_nothing(self, server, sdk):
        assert cached(chat(sdk, "a secret").usage) == 0
        claims = {
            "extra_headers": {"x-tenant-id": "ada", "openai-organization": "ada"},
            "extra_body": {"tenant": "ada", "scope": {"tenant": "ada"}},
            "user": "ada",
        }
        before = server.wait_idle()
        with server.openai(BEN) as other:
            probe = chat(other, "a secret", max_tokens=1, **claims)
            assert cached(probe.usage) == 0
            computed = server.wait_idle()["anaphora_computed_tokens_total"]
            computed -= before["anaphora_computed_tokens_total"]
            assert computed == probe.usage.prompt_tokens  # so time tells nothing either
            assert cached(chat(other, "a secret").usage) > 0
        assert cached(chat(sdk, "a secret").usage) > 0

    @ROUTES
    @pytest.mark.parametrize("field", ["cache_salt", "prompt_cache_key"])
    def test_salt_and_cache_key_only_narrow(self, server, sdk, ask, field):
        def hit(client, **body):
            return cached(ask(client, f"a {field}", max_tokens=1, extra_body=body).usage)

        assert hit(sdk) == 0
        assert [hit(sdk, **{field: f"{i}"}) for i in range(5)] == [0] * 5
        assert hit(sdk, **{field: "0"}) == hit(sdk) > 0
        with server.openai(BEN) as other:
            assert hit(other, **{field: "0"}) == 0  # the same word under another key

    def test_without_a_key_there_is_no_answer(self, server):
        for key in ("wrong", ADA.upper(), ADA + "x"):
            with server.openai(key) as other:
                with pytest.raises(openai.AuthenticationError) as caught:
                    chat(other, "the sea")
                assert caught.value.code == "invalid_api_key"
        with server.http() as http:
            del http.headers["authorization"]
            for path in ("/metrics", "/v1/models"):
                check_error(http.get(path), 401)
            assert http.get("/health").status_code == 200


class TestLoad:
    @pytest.mark.parametrize("how", ["whole", "stream", "sdk"])
    def test_a_client_that_leaves_frees_its_blocks_within_a_second(self, server, sdk, how):
        body = {"model": MODEL, "prompt": token_ids(3, 40), "max_tokens": 5000, "ignore_eos": True}

        def seconds_until_free():
            server.wait_idle()
            if how == "sdk":
                client = sdk.completions.create(
                    model=MODEL, prompt=body["prompt"], max_tokens=5000, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                next(iter(client))
            else:
                client = server.send(COMPLETIONS, body | {"stream": how == "stream"})
            wait_until(lambda: server.metric("kv_blocks_used") > 0, seconds=TIMEOUT)
            client.close()
            left = time.monotonic()
            wait_until(lambda: server.metric("kv_blocks_used") == 0, seconds=TIMEOUT)
            return time.monotonic() - left

        # a busy machine may be late once, but not every time
        assert any(seconds_until_free() < 1 for _ in range(4))
        assert server.wait_idle()["anaphora_num_requests_running"] == 0

    def test_two_hundred_requests_at_once(self, server, sdk):
        def ask(client, number):
            return client.completions.create(
                model=MODEL, prompt=token_ids(1000 + number, 5), max_tokens=2, temperature=0
            )

        async def ask_all():
            async with server.async_openai() as client:
                return await asyncio.gather(*(ask(client, number) for number in range(200)))

        answers = asyncio.run(ask_all())
        assert all(answer.usage.prompt_tokens == 5 for answer in answers)
        assert all(1 <= answer.usage.completion_tokens <= 2 for answer in answers)
        for number in range(0, 200, 10):  # each got its own
            assert answers[number].choices[0].text == ask(sdk, number).choices[0].text
        assert server.wait_idle()["anaphora_kv_blocks_used"] == 0

    def test_more_than_the_cache_holds(self, tmp_path):
        """Thirty requests in a cache for four: they are set back, and answered as if alone."""
        path = tmp_path / "tiny"
        config = CONFIG | {"max_position_embeddings": 2048}
        write_directory(path, config, random_weights(config))
        prompts = [np.random.default_rng(i).integers(3, 700, 70).tolist() for i in range(30)]
        fields = {"model": "tiny", "max_tokens": 60, "temperature": 0, "logprobs": 2}
        fields |= {"extra_body": {"ignore_eos": True}}

        async def ask_all():
            async with running.async_openai() as client:
                ask = client.completions.create
                return await asyncio.gather(*(ask(prompt=p, **fields) for p in prompts))

        with serving(tmp_path, str(path), "--kv-cache-memory", "160KiB") as running:
            crowd = [numbers(answer.choices[0]) for answer in asyncio.run(ask_all())]
            after = running.wait_idle()
            assert after["anaphora_num_preemptions_total"] > 0
            assert after["anaphora_engine_restarts_total"] == 0
            assert after["anaphora_prefix_cache_queries_total"] == 30 * 70  # once each
            with running.openai() as client:
                for prompt, expected in zip(prompts[::6], crowd[::6], strict=True):
                    answer = client.completions.create(prompt=prompt, **fields)
                    assert numbers(answer.choices[0]) == expected
            with running.http() as http:
                body = {"model": "tiny", "prompt": [5] * 560}
                error = check_error(http.post(COMPLETIONS, json=body), 400)
                last = http.post(COMPLETIONS, json=body | {"prompt": [5] * 559, "max_tokens": 1})
            assert error["code"] == "context_length_exceeded"
            assert "560 tokens" in error["message"]
            assert last.json()["usage"]["total_tokens"] == 560  # after all else was evicted


def assert_monotonic(samples):
    """No counter ever goes backwards."""
    for earlier, later in itertools.pairwise(samples):
        for name, value in earlier.items():
            if name.split()[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert later[name] >= value, name


class TestEnds:
    """Of the engine and of the server."""

    def test_a_killed_engine_is_told_and_replaced(self, server, sdk):
        expected = numbers(complete(sdk, "the phoenix").choices[0])
        assert cached(complete(sdk, "the phoenix").usage) > 0
        samples = [server.metrics()]
        pid = server.engine_pid
        stream = complete(
            sdk, "the phoenix", stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        next(events)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine died"):
            list(events)
        with pytest.raises(openai.InternalServerError) as refusal:
            complete(sdk, "the phoenix")
        assert refusal.value.status_code == 503
        assert int(refusal.value.response.headers["retry-after"]) >= 1
        assert refusal.value.code == "server_is_overloaded"
        with server.http() as http:
            assert http.get("/ready").status_code == 503
        samples.append(server.metrics())
        with server.openai(max_retries=20) as patient:  # does what retry-after says
            answer = complete(patient, "the phoenix")
        assert numbers(answer.choices[0]) == expected
        assert cached(answer.usage) == 0  # nothing outlives the process
        assert server.engine_pid not in (None, pid)
        samples.append(server.wait_idle())
        assert_monotonic(samples)
        restarts = [sample["anaphora_engine_restarts_total"] for sample in samples]
        assert restarts == [restarts[0], restarts[0] + 1, restarts[0] + 1]

    def test_a_kill_in_the_middle_of_a_prompt(self, server, sdk):
        before = server.wait_idle()["anaphora_engine_steps_total"]
        body = {"model": MODEL, "prompt": token_ids(4, 4000), "max_tokens": 1}
        with server.send(COMPLETIONS, body) as sock:
            wait_until(lambda: server.metric("engine_steps_total") > before, seconds=TIMEOUT)
            os.kill(server.engine_pid, signal.SIGKILL)
            assert sock.recv(1000).startswith(b"HTTP/1.1 500 ")
        with server.openai(max_retries=20) as patient:
            assert complete(patient, "the sea").usage.completion_tokens == 8

    def test_offline_with_the_model_in_place_until_sigterm(self, smollm2_path, tmp_path):
        """Starts without a network, ends its streams, and leaves no process and no file.

        The signal goes to the engine too, as service managers and terminals send it.
        """
        cache = tmp_path / "cache"
        (cache / "models").mkdir(parents=True)
        (cache / "models" / smollm2_path.name).symlink_to(smollm2_path)
        with serving(
            tmp_path, "--kv-cache-memory", "32MiB", ANAPHORA_CACHE=str(cache), **NO_INDEX
        ) as running:
            pids = children(running.process.pid)
            assert running.engine_pid in pids
            body = {"prompt": f"{CANARY} once upon a time", "max_tokens": 40, "stream": True}
            with running.openai() as client:
                stream = client.completions.create(model=MODEL, **body)
                next(iter(stream))
                os.killpg(running.process.pid, signal.SIGTERM)
                *_, last = stream
            assert last.choices[0].finish_reason is not None
            assert running.process.wait(TIMEOUT) == 0
            assert not [pid for pid in pids if is_alive(pid)]
            assert running.temporary_files == []
        assert "Traceback" not in running.errors
        assert_no_canary_in_files(tmp_path)

    def test_a_killed_server_leaves_no_engine_and_no_file(self, tmp_path):
        """Nobody can tidy up then, and each restart would leave more."""
        path = write_directory(tmp_path / "tiny", CONFIG, random_weights(CONFIG))
        with serving(tmp_path, str(path), "--kv-cache-memory", "160KiB") as running:
            pids = children(running.process.pid)
            running.process.kill()
            wait_until(lambda: not any(map(is_alive, pids)), seconds=TIMEOUT)
            assert pids
            assert running.temporary_files == []


def assert_no_canary_in_files(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path.name


# pip reaches no index and no folder of files
class TestBadRequests:
    @pytest.mark.parametrize(
        ("path", "fields", "status", "param"),
        [
            (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
            (CHAT, {"max_tokens": -5}, 400, "max_tokens"),
            (CHAT, {"max_tokens": "many"}, 400, "max_tokens"),
            (CHAT, {"messages": "hello"}, 400, "messages"),
            (CHAT, {"temperature": [1]}, 400, "temperature"),
            (CHAT, {"n": 129}, 400, "n"),
            (CHAT, {"model": "gpt-4"}, 404, "model"),
            (COMPLETIONS, {"model": None}, 400, "model"),
            (COMPLETIONS, {"max_tokens": 10**9}, 400, "max_tokens"),
            (COMPLETIONS, {"prompt": [5, VOCABULARY]}, 400, "prompt"),
            (COMPLETIONS, {"prompt": [5, -1]}, 400, "prompt"),
            (COMPLETIONS, {"prompt": [5] * CACHE_TOKENS}, 400, "prompt"),
            (COMPLETIONS, {"prompt": [5] * 9000}, 400, "prompt"),
            (COMPLETIONS, {"prompt": {}}, 400, "prompt"),
            (COMPLETIONS, {"stop_token_ids": [VOCABULARY]}, 400, "stop_token_ids"),
            (COMPLETIONS, {"logit_bias": {f"{VOCABULARY}": 1}}, 400, "logit_bias"),
        ],
    )
    def test_the_field_is_named(self, server, path, fields, status, param):
        good = {"model": MODEL, "max_tokens": 1}
        good |= {"messages": messages("x")} if path == CHAT else {"prompt": "x"}
        with server.http() as http:
            error = check_error(http.post(path, json=good | fields), status)
        assert error["param"] == param
        assert param in error["message"] or error["code"] == "context_length_exceeded"
        if len(str(fields.get("prompt", ""))) > 1000:
            assert error["code"] == "context_length_exceeded"
            assert f"{CACHE_TOKENS} tokens" in error["message"]

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"model": "smollm2",}'])
    def test_broken_json(self, server, content):
        with server.http() as http:
            http.headers["content-type"] = "application/json"
            error = check_error(http.post(CHAT, content=content), 400)
        assert "JSON" in error["message"]


def test_prompts_and_keys_appear_in_no_output(server):
    bodies = [
        {"prompt": CANARY, "max_tokens": 2},
        {"prompt": CANARY, "max_tokens": 2, "stream": True, "user": CANARY},
        {"prompt": CANARY, "temperature": CANARY},
        {"prompt": CANARY, "max_tokens": 10**9},
    ]
    with server.http() as http:
        for body in bodies:
            http.post(f"{COMPLETIONS}?key={CANARY}", json={"model": MODEL} | body)
        http.post(COMPLETIONS, content=f'{{"{CANARY}'.encode())
        http.get("/v1/models", headers={"authorization": f"Bearer wrong-{CANARY}"})
        metrics = http.get("/metrics").text
    assert f"POST {COMPLETIONS} 200" in server.errors
    assert "anaphora_prompt_tokens_total" in metrics
    for text in (server.output, server.errors, metrics, str(server.temporary_files)):
        assert CANARY not in text
    assert_no_canary_in_files(server.folder)
