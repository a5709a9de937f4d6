"""Every request that is let in leaves one row, and the rows are what the counters say."""

from __future__ import annotations

import contextlib
import csv
import io
import threading

import openai
import pyarrow.parquet
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, select

from anaphora.errors import EngineDied, StoreUnavailable
from anaphora.fake import FakeLLM
from anaphora.server.endpoints import Endpoint, Price
from anaphora.server.store import MEMORY, Store
from anaphora.server.tables import USAGE
from anaphora.server.usage import UsageLog, UsageRow
from anaphora.server.usage_report import Filter, rows, totals
from tests.server.running import HELLO, check_error, wait_until

PRICE = Price(input=2.0, cached_input=0.5, output=10.0)


@pytest.fixture
def store():
    with contextlib.closing(Store(MEMORY)) as opened:
        yield opened


def endpoints():
    return [
        Endpoint(name="chat", price=PRICE),
        Endpoint(name="gold", workload="provisioned", model_units=5),
        Endpoint(name="night", workload="batch"),
        Endpoint(name="private", tenants=frozenset({"ann"})),
    ]


def all_rows(server, store):
    server.app.state.service.usage_log.flush()
    with store.read() as connection:
        return [dict(r) for r in connection.execute(select(USAGE).order_by(USAGE.c.id)).mappings()]


def counters(http):
    """Sums over the labels that rows have no column for."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            key = sample.name, sample.labels.get("endpoint"), sample.labels.get("class")
            found[key] = found.get(key, 0) + sample.value
    return found


def test_a_row_says_who_what_and_how_much(store, serve):
    server = serve("ann=k1", "ben=k2", store=store, endpoints=endpoints())
    for _ in range(2):
        with server.openai() as client:
            answer = client.chat.completions.create(model="chat", messages=HELLO * 20, max_tokens=7)
    row = all_rows(server, store)[1]
    usage = answer.usage
    assert row["tenant"] == "ann"
    assert (row["endpoint"], row["workload"], row["adapter"]) == ("chat", "interactive", "")
    assert row["input_tokens"] == usage.prompt_tokens
    assert row["cached_tokens"] == usage.prompt_tokens_details.cached_tokens > 0
    assert row["output_tokens"] == usage.completion_tokens == 7
    assert (row["finish_reason"], row["status"]) == ("length", 200)
    assert 0 < row["ttft"] <= row["duration"]
    assert row["request_id"] in answer.id
    uncached = row["input_tokens"] - row["cached_tokens"]
    assert row["charged_tokens"] == pytest.approx(uncached + 0.1 * row["cached_tokens"] + 2 * 6)


def test_classes_follow_from_the_endpoint_and_a_client_can_only_lower_itself(store, serve):
    server = serve(store=store, endpoints=endpoints())
    asked = [("chat", None), ("chat", "flex"), ("gold", "priority"), ("gold", "batch"),
             ("night", "priority")]  # fmt: skip
    with server.openai() as client:
        for model, tier in asked:
            answer = client.chat.completions.create(
                model=model, messages=HELLO, max_tokens=2, service_tier=tier
            )
    assert [row["workload"] for row in all_rows(server, store)] == [
        *("interactive", "batch", "provisioned", "batch", "batch"),
    ]
    assert [(r.workload, r.endpoint) for r in server.llm.requests[2:3]] == [("provisioned", "gold")]
    assert answer.service_tier == "flex"


def test_an_endpoint_of_others_does_not_exist(store, serve):
    server = serve("ann=k1", "ben=k2", store=store, endpoints=endpoints())
    with server.http() as http:
        assert "private" in http.get("/v1/models").text
    with server.http(headers={"authorization": "Bearer k2"}) as http:
        assert "private" not in http.get("/v1/models").text
        check_error(http.get("/v1/models/private"), 404)
        body = {"model": "private", "messages": HELLO}
        error = check_error(http.post("/v1/chat/completions", json=body), 404)
        assert error["code"] == "model_not_found"
        assert "chat or gold or night" in error["message"]
    assert all_rows(server, store) == []


def test_hits_show_what_they_save_of_bought_capacity(store, serve):
    server = serve(store=store, endpoints=endpoints())
    with server.openai() as client:
        usages = [
            client.chat.completions.create(model="gold", messages=HELLO * 20, max_tokens=2).usage
            for _ in range(2)
        ]
    miss, hit = [usage.capacity_tokens for usage in usages]
    assert hit == pytest.approx(miss - 0.9 * usages[1].prompt_tokens_details.cached_tokens)


def test_aborted_and_failed_requests_are_rows_too(store, serve):
    server = serve(store=store, llm=FakeLLM(token_delay=0.02))
    sock = server.send("/v1/chat/completions", {"model": "fake", "messages": HELLO, "stream": True})
    assert b"200 OK" in sock.recv(1000)
    sock.close()
    wait_until(lambda: server.llm.aborted)
    server.llm.enqueue("ab", then=EngineDied("gone"))
    with server.openai() as client, pytest.raises(openai.APIError):
        list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    server.llm.enqueue(EngineDied("gone"))
    with server.openai() as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake", messages=HELLO)
    wait_until(lambda: len(all_rows(server, store)) == 3)
    left, died, never = all_rows(server, store)
    assert (left["finish_reason"], left["status"]) == ("abort", 499)
    assert left["input_tokens"] > 0
    assert (died["finish_reason"], died["status"]) == ("error", 500)
    assert died["output_tokens"] == 2
    assert (never["finish_reason"], never["input_tokens"], never["ttft"]) == ("error", 0, None)


def test_totals_equal_the_counters_whatever_happens(store, serve):
    """Many clients, streams that are cut, choices, several prompts, refusals, tiers."""
    server = serve(store=store, endpoints=endpoints(), llm=FakeLLM(token_delay=0.001))
    paths = "/v1/chat/completions", "/v1/completions"

    def work(number):
        with server.http() as http:
            for i in range(12):
                kind = (number + i) % 6
                body = {"model": ["chat", "gold", "night"][i % 3], "max_tokens": 5, "n": 1 + i % 3}
                if kind < 3:
                    body["messages"] = HELLO * (1 + i)
                else:
                    body["prompt"] = ["some text " * i + "x", "other"]
                if kind == 1:
                    body["max_tokens"] = 100_000  # refused
                if kind in (2, 5):
                    body["stream"] = True
                path = paths[kind >= 3]
                if kind == 5:
                    with http.stream("POST", path, json=body) as response:
                        next(response.iter_bytes())
                else:
                    http.post(path, json=body)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def open_requests():
        return server.app.state.service.limiter._num_running

    wait_until(lambda: not open_requests())
    all_rows(server, store)
    sums = totals(store, ["endpoint", "class"], Filter(), {"chat": PRICE})
    assert sum(row["requests"] for row in sums) == 6 * 10
    with server.http() as http:
        found = counters(http)
        by_http = http.get("/usage?by=endpoint,class").json()["data"]
    assert by_http == sums
    for row in sums:
        labels = row["endpoint"], row["class"]
        assert found["anaphora_requests_total", *labels] == row["requests"]
        assert found["anaphora_prompt_tokens_total", *labels] == row["input_tokens"]
        assert found["anaphora_cached_prompt_tokens_total", *labels] == row["cached_tokens"]
        assert found["anaphora_generation_tokens_total", *labels] == row["output_tokens"]
    assert {(row["endpoint"], row["class"]) for row in sums} == {
        (endpoint, workload)
        for _, endpoint, workload in found
        if endpoint is not None
    }  # fmt: skip
    assert found["anaphora_usage_rows_pending", None, None] == 0


def row(**changes):
    values = {
        "at": 86_400.0 * 20_000, "request_id": "r", "tenant": "ann", "key_id": "k",
        "endpoint": "chat", "workload": "interactive", "adapter": "", "input_tokens": 1_000_000,
        "cached_tokens": 400_000, "cached_host_tokens": 0, "cached_disk_tokens": 0,
        "output_tokens": 100_000, "reasoning_tokens": 0, "charged_tokens": 1.0, "ttft": None,
        "duration": 1.0, "finish_reason": "stop", "status": 200,
    }  # fmt: skip
    return UsageRow(**(values | changes))


@pytest.fixture
def filled(store):
    log = UsageLog(store)
    log.add(row())
    log.add(row(tenant="ben", at=86_400.0 * 20_001))
    log.add(row(tenant="ben", endpoint="free", at=86_400.0 * 20_001 + 5))
    log.close()
    assert log.num_pending == log.num_lost == 0
    return store


def test_a_price_list_turns_rows_into_money(filled):
    by_tenant = totals(filled, ["tenant"], Filter(), {"chat": PRICE})
    assert [(r["tenant"], r["requests"], r["cost"], r["saved"]) for r in by_tenant] == [
        ("ann", 1, pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.1 * 10), pytest.approx(0.4 * 1.5)),
        ("ben", 2, pytest.approx(2.4), pytest.approx(0.6)),
    ]
    [everything] = totals(filled, [], Filter(), {"chat": PRICE})
    assert everything["requests"] == 3
    assert everything["cost"] == pytest.approx(4.8)
    by_day = totals(filled, ["day", "endpoint"], Filter(tenant="ben"), {})
    assert [(r["day"], r["endpoint"]) for r in by_day] == [
        ("2024-10-05", "chat"), ("2024-10-05", "free"),
    ]  # fmt: skip
    assert "cost" not in by_day[0]
    assert totals(filled, ["tenant"], Filter(since=86_400.0 * 20_001 + 6), {}) == []


def test_times_bound_what_is_counted(filled):
    day = 86_400.0 * 20_001
    for which, expected in [
        (Filter(since=day), 2),
        (Filter(until=day), 1),
        (Filter(since=day, until=day + 5), 1),
        (Filter(tenant="ann", since=day), 0),
    ]:
        assert sum(len(batch) for batch in rows(filled, which)) == expected


def test_a_tenant_sees_its_own_usage_and_the_admin_all(filled, serve):
    server = serve("ann=k1", "ben=k2", admin_key="root", store=filled, endpoints=endpoints())
    with server.http(headers={"authorization": "Bearer k2"}) as http:
        data = http.get("/usage?by=tenant").json()["data"]
        assert [r["tenant"] for r in data] == ["ben"]
        check_error(http.get("/usage?tenant=ann"), 403)
        assert check_error(http.get("/usage?by=colour"), 400)["param"] == "by"
        assert check_error(http.get("/usage?since=yesterday"), 400)["param"] == "since"
        assert check_error(http.get("/usage?format=xml"), 400)["param"] == "format"
        lines = list(csv.DictReader(io.StringIO(http.get("/usage?format=csv").text)))
        assert [line["tenant"] for line in lines] == ["ben", "ben"]
    with server.http(headers={"authorization": "Bearer root"}) as http:
        data = http.get("/usage?by=tenant&since=2024-10-04&until=2024-10-05").json()["data"]
        assert [(r["tenant"], r["cost"]) for r in data] == [("ann", pytest.approx(2.4))]
        parquet = http.get("/usage?format=parquet").content
    table = pyarrow.parquet.read_table(io.BytesIO(parquet)).to_pylist()
    assert [r["tenant"] for r in table] == ["ann", "ben", "ben"]
    assert table[0]["input_tokens"] == 1_000_000
    assert table[0]["ttft"] is None


def test_without_a_database_nothing_is_kept_and_the_server_says_so(serve):
    server = serve()
    with server.http() as http:
        http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO})
        for path in ("/usage", "/admin/tenants"):
            assert check_error(http.get(path), 501)["code"] == "no_database"


def test_while_the_disk_is_full_rows_wait_and_requests_go_on(serve, tmp_path, monkeypatch):
    """SQLite itself says when it is full: its size is bounded to what it has."""
    monkeypatch.setattr("anaphora.server.usage._RETRY_SECONDS", 0.02)
    store = Store(str(tmp_path / "a.db"))
    with store.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    limit = pages
    event.listen(
        store._engine, "checkout", lambda c, *_: c.execute(f"PRAGMA max_page_count={limit}")
    )
    server = serve("ann=k1", store=store, llm=FakeLLM())
    with server.openai() as client:
        for _ in range(200):
            client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
        log = server.app.state.service.usage_log
        wait_until(lambda: log.num_pending > 0)
        with server.http() as http:
            assert http.get("/health").status_code == 200
        limit = 10_000
        assert log.flush()
    assert log.num_pending == log.num_lost == 0
    assert sum(r["requests"] for r in totals(store, [], Filter(), {})) == 200
    server.app.state.service.close()
    store.close()


def test_rows_are_lost_only_beyond_a_bound_and_then_counted(store, monkeypatch, caplog):
    monkeypatch.setattr("anaphora.server.usage._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("anaphora.server.usage.MAX_PENDING_ROWS", 10)
    log = UsageLog(store)

    @contextlib.contextmanager
    def fail():
        raise StoreUnavailable("the database failed (full)")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", fail)
        for _ in range(15):
            log.add(row())
        assert log.num_lost == 5
        log.close(timeout=0.1)
    assert log.num_pending == 10
    assert "10 usage rows could not be written" in caplog.text
    assert caplog.text.count("cannot be written and waits") == 1
