"""Files and batches through the real SDK: states, results, tenants, and servers that end."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import time

import httpx
import openai
import pytest

from anaphora.errors import EngineDied, StoreUnavailable
from anaphora.fake import FakeLLM
from anaphora.server import batch_runner, file_store
from anaphora.server.batch_store import BatchStore
from anaphora.server.endpoints import Price
from anaphora.server.registry import LimitTerms, Registry
from anaphora.server.store import MEMORY, Store
from anaphora.server.usage_report import Filter, totals
from tests.server.running import HELLO, check_error, serving, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(batch_runner, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(batch_runner, "_RETRY_SECONDS", 0.01)


@pytest.fixture
def store():
    with contextlib.closing(Store(MEMORY)) as opened:
        yield opened


def line(number, *, url=CHAT, **body):
    fields = {"model": "fake", "messages": HELLO, "max_tokens": 4} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": fields}


def jsonl(lines):
    return "\n".join(json.dumps(each) for each in lines).encode()


def upload(client, content):
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")


def start(client, content, *, endpoint=CHAT, window="24h", **fields):
    file = upload(client, content)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields
    )


def finished(client, batch, *, seconds=20):
    deadline = time.monotonic() + seconds
    while (now := client.batches.retrieve(batch.id)).status in file_store.OPEN_STATES:
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def results(client, file_id):
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_results(store, serve):
    server = serve("ann=k1", store=store)
    lines = [line(i, messages=[{"role": "user", "content": f"hello {i}"}]) for i in range(30)]
    with server.openai() as client:
        batch = start(client, jsonl(lines), metadata={"job": "nightly"})
        assert batch.status == "validating"
        done = finished(client, batch)
        assert done.status == "completed"
        assert done.metadata == {"job": "nightly"}
        assert (done.request_counts.total, done.request_counts.completed) == (30, 30)
        assert done.model == "fake"
        for earlier, later in zip(
            ["created_at", "in_progress_at", "finalizing_at"],
            ["in_progress_at", "finalizing_at", "completed_at"],
            strict=True,
        ):
            assert getattr(done, earlier) <= getattr(done, later)
        found = results(client, done.output_file_id)
        assert done.error_file_id is None
        assert [row["custom_id"] for row in found] == [f"line-{i}" for i in range(30)]
        assert len({row["id"] for row in found}) == 30
        for row in found:
            assert row["error"] is None
            assert row["response"]["status_code"] == 200
            assert row["response"]["body"]["service_tier"] == "flex"
            answer = openai.types.chat.ChatCompletion.model_validate(row["response"]["body"])
            assert answer.choices[0].message.content
        usage = [row["response"]["body"]["usage"] for row in found]
        assert done.usage.input_tokens == sum(u["prompt_tokens"] for u in usage)
        assert done.usage.output_tokens == 4 * 30
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
        assert done.usage.input_tokens_details.cached_tokens == cached
        file = client.files.retrieve(done.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    server.app.state.service.usage_log.flush()
    [total] = totals(store, ["class", "tenant"], Filter(), {})
    assert (total["class"], total["tenant"], total["requests"]) == ("batch", "ann", 30)
    assert total["input_tokens"] == done.usage.input_tokens
    assert {request.workload for request in server.llm.requests} == {"batch"}
    assert all(request.urgent_in > 0 for request in server.llm.requests)


def test_requests_that_begin_alike_run_side_by_side(store, serve):
    server = serve(store=store)
    topics = ["alpha " * 20, "beta " * 20, "gamma " * 20]
    lines = [
        line(i, messages=[{"role": "user", "content": topics[i % 3] + str(i)}]) for i in range(30)
    ]
    random.Random(1).shuffle(lines)
    with server.openai() as client:
        assert finished(client, start(client, jsonl(lines))).status == "completed"
    order = [
        next(t for t in topics if t.encode() in bytes(i for i in r.prompt_token_ids if i < 256))
        for r in server.llm.requests
    ]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == 2


def test_lines_that_fail_go_to_the_error_file_with_their_status(store, serve):
    server = serve(store=store)
    lines = [line(0), line(1, max_tokens=100_000), line(2, temperature=9), line(3)]
    with server.openai() as client:
        done = finished(client, start(client, jsonl(lines)))
        assert done.status == "completed"
        assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
        good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert [row["custom_id"] for row in good] == ["line-0", "line-3"]
    assert [row["custom_id"] for row in bad] == ["line-1", "line-2"]
    assert bad[0]["response"]["status_code"] == 400
    assert bad[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert bad[1]["response"]["body"]["error"]["param"] == "temperature"


def test_completions_too(store, serve):
    server = serve(store=store)
    lines = [line(i, url="/v1/completions", prompt="x") for i in range(3)]
    for each in lines:
        del each["body"]["messages"]
    with server.openai() as client:
        done = finished(client, start(client, jsonl(lines), endpoint="/v1/completions"))
        assert done.request_counts.completed == 3
        assert results(client, done.output_file_id)[0]["response"]["body"]["choices"]


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", ["empty_file"]),
        (b"\n \n", ["empty_file"]),
        (b"{\n", ["invalid_json_line"]),
        (b"[" * 100_000 + b"\n", ["invalid_json_line"]),
        (b"[]\n", ["invalid_line"]),
        (jsonl([line(1), line(1)]), ["duplicate_custom_id"]),
        (jsonl([line(1) | {"custom_id": ""}]), ["invalid_custom_id"]),
        (jsonl([line(1) | {"custom_id": 5}]), ["invalid_custom_id"]),
        (jsonl([line(1) | {"custom_id": "a\0"}]), ["invalid_custom_id"]),
        (jsonl([line(1) | {"method": "GET"}]), ["invalid_method"]),
        (jsonl([line(1, url="/v1/embeddings")]), ["mismatched_url"]),
        (jsonl([line(1) | {"body": None}]), ["invalid_body"]),
        (jsonl([line(1, stream=True)]), ["invalid_body"]),
        (jsonl([line(1, model=None)]), ["missing_model"]),
        (jsonl([line(1), line(2, model="other")]), ["mismatched_model"]),
        (jsonl([line(1, model="other")]), ["model_not_found"]),
        (b"{}\n" * 100, ["invalid_custom_id"] * 50),
        (b"x" * (4 * 2**20 + 1), ["line_too_long"]),
    ],
)
def test_an_input_that_is_not_valid_fails_as_a_whole(store, serve, content, codes):
    server = serve(store=store)
    with server.openai() as client:
        failed = finished(client, start(client, content))
    assert failed.status == "failed"
    assert failed.failed_at
    assert [error.code for error in failed.errors.data] == codes
    assert all(error.message for error in failed.errors.data)
    assert failed.output_file_id is None
    assert server.llm.requests == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(i): "b" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}},
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(store, serve, changes, param):
    server = serve(store=store)
    with server.openai() as client, server.http() as http:
        file = upload(client, jsonl([line(1)]))
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        assert check_error(http.post("/v1/batches", json=body | changes), 400)["param"] == param


def test_a_tenant_sees_nothing_of_another(store, serve):
    server = serve("ann=k1", "ben=k2", store=store)
    with server.openai("k1") as ann, server.openai("k2") as ben:
        batch = start(ann, jsonl([line(1)]))
        done = finished(ann, batch)
        assert ben.files.list().data == []
        assert ben.batches.list().data == []
        for call in (
            lambda: ben.files.retrieve(done.input_file_id),
            lambda: ben.files.content(done.output_file_id),
            lambda: ben.files.delete(done.output_file_id),
            lambda: ben.batches.retrieve(batch.id),
            lambda: ben.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            ben.batches.create(
                input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
            )


def test_cancelling_keeps_what_is_done(store, serve):
    server = serve(store=store, llm=FakeLLM(token_delay=0.01))
    with server.openai() as client:
        batch = start(client, jsonl([line(i, max_tokens=40) for i in range(400)]))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        assert client.batches.cancel(batch.id).status == "cancelling"
        with pytest.raises(openai.ConflictError, match="still needs"):
            client.files.delete(batch.input_file_id)
        done = finished(client, batch)
        assert done.status == "cancelled"
        good, rest = results(client, done.output_file_id), results(client, done.error_file_id)
        assert client.batches.cancel(batch.id).status == "cancelled"
        client.files.delete(batch.input_file_id)
    assert 0 < len(good) < 400
    assert {row["error"]["code"] for row in rest} == {"batch_cancelled"}
    ids = [row["custom_id"] for row in good + rest]
    assert sorted(ids) == sorted(f"line-{i}" for i in range(400))


def test_a_batch_that_has_ended_cannot_be_cancelled(store, serve):
    server = serve(store=store)
    with server.openai() as client:
        done = finished(client, start(client, jsonl([line(1)])))
        with pytest.raises(openai.ConflictError, match="completed already"):
            client.batches.cancel(done.id)


def test_at_the_windows_end_what_is_done_is_kept(store, serve, monkeypatch):
    server = serve(store=store, llm=FakeLLM(token_delay=0.15))
    with server.openai() as client:
        monkeypatch.setattr("anaphora.server.batches._WINDOW_SECONDS", {"m": 4.0})
        monkeypatch.setattr("anaphora.server.batches._MIN_WINDOW", 1.0)
        batch = start(client, jsonl([line(i, max_tokens=10) for i in range(1600)]), window="1m")
        done = finished(client, batch)
        assert done.status == "expired"
        good, rest = results(client, done.output_file_id), results(client, done.error_file_id)
    assert good
    assert {row["error"]["code"] for row in rest} == {"batch_expired"}
    assert len(good) + len(rest) == 1600
    urgent = [request.urgent_in for request in server.llm.requests]
    assert urgent[-1] == 0 < urgent[0]  # it could not be done in time, and was hurried


def test_an_engine_that_dies_costs_nothing_but_time(store, serve):
    server = serve(store=store, llm=FakeLLM(token_delay=0.001))
    for _ in range(5):
        server.llm.enqueue("ab", then=EngineDied("gone"))
    with server.openai() as client:
        batch = start(client, jsonl([line(i) for i in range(60)]))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
        server.llm.refuse("a fresh engine is starting", retry_after=0.1)
        time.sleep(0.1)
        server.llm.recover()
        done = finished(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 60)
        assert len(results(client, done.output_file_id)) == 60


@pytest.mark.parametrize("seed", range(2))
def test_servers_that_end_at_any_time_leave_one_line_for_each_request(tmp_path, seed, monkeypatch):
    """A new server goes on where the last one stopped; claims of one that was killed run out."""
    monkeypatch.setattr(batch_runner, "_CLAIM_SECONDS", 0.2)
    rng = random.Random(seed)
    path = str(tmp_path / "a.db")
    batch_id, answered = None, 0
    for attempt in range(6):
        store = Store(path)
        with serving() as serve:
            server = serve(store=store, llm=FakeLLM(token_delay=0.002))
            with server.openai() as client:
                if batch_id is None:
                    batch_id = start(client, jsonl([line(i) for i in range(150)])).id
                if attempt == 5:
                    batch = client.batches.retrieve(batch_id)
                    done = finished(client, batch)
                    found = results(client, done.output_file_id)
                else:
                    time.sleep(rng.uniform(0.0, 0.15))
            if attempt % 2:  # as if it were killed: nothing is given back
                monkeypatch.setattr(BatchStore, "renew", lambda *_: {})
        monkeypatch.undo()
        monkeypatch.setattr(batch_runner, "_CLAIM_SECONDS", 0.2)
        monkeypatch.setattr(batch_runner, "_POLL_SECONDS", 0.02)
        monkeypatch.setattr(batch_runner, "_RETRY_SECONDS", 0.01)
        answered += len(server.llm.requests)
        store.close()
    assert done.status == "completed"
    assert [row["custom_id"] for row in found] == [f"line-{i}" for i in range(150)]
    assert answered >= 150


def test_files_are_listed_by_pages_and_expire(store, serve):
    server = serve(store=store)
    with server.openai() as client, server.http() as http:
        ids = [upload(client, b"{}").id for _ in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # the SDK pages
        assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
        assert client.files.list(purpose="batch_output").data == []
        for query in ("limit=0", "limit=10001", "limit=x", "order=up"):
            check_error(http.get(f"/v1/files?{query}"), 400)
        check_error(http.get("/v1/files?after=file-x"), 404)
        assert client.files.delete(ids[0]).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(ids[0])
        client.files.create(
            file=("b.jsonl", b"{}"), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
    later = file_store.FileStore(store, clock=lambda: time.time() + 31 * 86400)
    later.sweep()
    with server.openai() as client:
        assert client.files.list().data == []


@pytest.mark.parametrize(
    ("fields", "files", "status", "param"),
    [
        ({}, {"file": ("a", b"x")}, 400, "purpose"),
        ({"purpose": "fine-tune"}, {"file": ("a", b"x")}, 400, "purpose"),
        ({"purpose": "batch"}, {"other": ("a", b"x")}, 400, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, {"file": ("a", b"x")}, 400,
         "expires_after"),
        ({"purpose": "x" * 5000}, {"file": ("a", b"x")}, 400, None),
    ],
)  # fmt: skip
def test_bad_forms_are_refused_and_leave_nothing(store, serve, fields, files, status, param):
    server = serve(store=store)
    with server.http() as http:
        error = check_error(http.post("/v1/files", data=fields, files=files), status)
        assert error["param"] == param
        check_error(http.post("/v1/files", json={}), 415)
        bad = {"content-type": "multipart/form-data; boundary=x"}
        check_error(http.post("/v1/files", content=b"nonsense", headers=bad), 400)
    with store.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM files").scalar() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM file_chunks").scalar() == 0


def test_an_upload_is_bounded_and_a_broken_one_leaves_nothing(store, serve, monkeypatch):
    monkeypatch.setattr("anaphora.server.upload.MAX_FILE_BYTES", 3 * 2**20)
    server = serve(store=store)
    with server.http() as http:
        big = {"file": ("a", b"x" * (4 * 2**20))}
        with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
            check_error(http.post("/v1/files", data={"purpose": "batch"}, files=big), 413)
        good = {"file": ("../../etc/passwd", bytes(range(256)) * 4096 * 2)}
        answer = http.post("/v1/files", data={"purpose": "batch"}, files=good).json()
        assert answer["filename"] == "passwd"
        content = http.get(f"/v1/files/{answer['id']}/content")
        assert content.content == good["file"][1]
        sock = server.connect()
        head = (
            "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n"
            "content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
            'content-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        )
        sock.sendall(head.encode() + b"y" * 2_000_000)
        wait_until(lambda: _count(store, "files") == 2)
        sock.close()
        wait_until(lambda: _count(store, "files") == 1)


def _count(store, table):
    with store.read() as connection:
        return connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()


def test_a_removed_tenants_files_and_batches_go_along(store, serve):
    registry = Registry(store)
    registry.add_tenant("ann")
    _, secret = registry.create_key("ann")
    server = serve(store=store)
    server_key = secret
    wait_until(lambda: not server.app.state.service.tenants.is_open)
    with server.openai(server_key) as client:
        finished(client, start(client, jsonl([line(1)])))
    registry.remove_tenant("ann")
    for table in ("files", "file_chunks", "batches", "batch_lines"):
        assert _count(store, table) == 0


def test_limits_a_minute_do_not_hold_up_batches(store, serve):
    Registry(store).set_limits("ann", "*", LimitTerms(requests_per_minute=3))
    server = serve("ann=k1", store=store)
    wait_until(lambda: server.app.state.service.limiter._terms)
    with server.openai() as client:
        done = finished(client, start(client, jsonl([line(i) for i in range(20)])))
    assert done.request_counts.completed == 20


def test_open_batches_are_bounded(store, serve, monkeypatch):
    monkeypatch.setattr("anaphora.server.batches.MAX_OPEN", 1)
    server = serve(store=store, llm=FakeLLM(token_delay=0.05))
    with server.openai() as client:
        start(client, jsonl([line(i) for i in range(5)]))
        with pytest.raises(openai.RateLimitError):
            start(client, jsonl([line(1)]))


def test_a_failing_database_holds_a_batch_up_and_loses_nothing(store, serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "_CLAIM_SECONDS", 0.2)
    server = serve(store=store, llm=FakeLLM(token_delay=0.001))
    read_range, record = file_store.FileStore.read_range, BatchStore.record
    calls = {"read": 0, "record": 0}

    def fail_at_times(kind, work, every):
        def attempt(*arguments):
            calls[kind] += 1
            if calls[kind] % every == 0:
                raise StoreUnavailable("the database failed (disk I/O error)")
            return work(*arguments)

        return attempt

    monkeypatch.setattr(file_store.FileStore, "read_range", fail_at_times("read", read_range, 50))
    monkeypatch.setattr(BatchStore, "record", fail_at_times("record", record, 2))
    with server.openai() as client:
        done = finished(client, start(client, jsonl([line(i) for i in range(120)])))
        assert (done.status, done.request_counts.completed) == ("completed", 120)
        assert len(results(client, done.output_file_id)) == 120
    assert calls["read"] > 120


def test_a_server_that_was_frozen_lets_go_of_what_another_took_over(store):
    batches = BatchStore(store)
    batch = batches.create(
        tenant="ann", key_id="k", endpoint=CHAT, input_file_id="file-x", window_seconds=86400.0,
        completion_window="24h", metadata=None, output_expires_after=None,
    )  # fmt: skip
    assert [b.id for b in batches.claim("first", 0.05)] == [batch.id]
    assert batches.renew("first", [batch.id], 0.05) == {batch.id: "validating"}
    time.sleep(0.1)
    assert [b.id for b in batches.claim("second", 30.0)] == [batch.id]
    assert batches.renew("first", [batch.id], 30.0) == {}  # it learns of it
    batches.renew("first", [batch.id], 0.0)  # and cannot give it up for the other
    assert batches.claim("third", 30.0) == []


def test_limits_at_an_endpoint_bind_batches(store, serve):
    Registry(store).set_limits("ann", "fake", LimitTerms(requests_per_minute=600))
    server = serve("ann=k1", store=store)
    wait_until(lambda: server.app.state.service.limiter._terms)
    limiter = server.app.state.service.limiter
    limiter.admit("ann", "fake", 1, 1)
    limiter._accounts["ann", "fake"].buckets["requests"].level = 0.0
    with server.openai() as client:
        started = time.monotonic()
        done = finished(client, start(client, jsonl([line(i) for i in range(15)])))
    assert done.request_counts.completed == 15
    assert time.monotonic() - started > 1  # ten a second


def test_a_form_that_is_cut_off_is_no_file(store, serve):
    server = serve(store=store)
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 1000
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with server.http() as http:
        error = check_error(http.post("/v1/files", content=body, headers=headers), 400)
        assert "cut off" in error["message"]
        assert http.get("/v1/files").json()["data"] == []


def test_lines_that_are_given_back_cost_nothing(store, serve):
    server = serve("ann=k1", store=store, llm=FakeLLM(token_delay=0.01))
    with server.openai() as client:
        start(client, jsonl([line(i, max_tokens=1000, ignore_eos=True) for i in range(5)]))
        wait_until(lambda: len(server.llm.requests) == 5)
        time.sleep(0.1)
    server.stop()
    [total] = totals(store, ["status"], Filter(), {"fake": Price(output=1e6)})
    assert (total["status"], total["requests"], total["cost"]) == (503, 5, 0)
    assert total["output_tokens"] > 0
