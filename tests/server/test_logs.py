from __future__ import annotations

import logging

import pytest

from anaphora.errors import EngineDied
from tests.server.running import Serve, wait_until

CANARY = "canary-5f1d"


def test_prompts_and_keys_stay_out_of_logs_and_metrics(
    serve: Serve, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for noisy in ("httpx", "httpcore"):  # the test's own client
        caplog.set_level(logging.CRITICAL, logger=noisy)
    caplog.set_level(logging.DEBUG)
    server = serve(f"team={CANARY}-key")
    messages = [{"role": "user", "content": f"{CANARY}-prompt"}]
    body = {"model": "fake", "messages": messages, "user": f"{CANARY}-user"}
    json_type = {"content-type": "application/json"}
    with server.http() as http:
        for path in ("/v1/chat/completions", f"/v1/chat/completions?api_key={CANARY}-query"):
            http.post(path, json=body)
            http.post(path, json={**body, "stream": True})
        http.post("/v1/chat/completions", json={**body, "temperature": CANARY})
        http.post("/v1/completions", json={"model": "fake", "prompt": CANARY, "n": 0})
        http.post("/v1/completions", content=f'{{"prompt": "{CANARY}', headers=json_type)
        http.get("/v1/models", headers={"authorization": f"Bearer wrong-{CANARY}"})
        for error in (RuntimeError(CANARY), EngineDied("the engine died"), ValueError(CANARY)):
            server.llm.enqueue(error)
            http.post("/v1/chat/completions", json=body)
        server.llm.enqueue("a", then=KeyError(CANARY))
        http.post("/v1/chat/completions", json={**body, "stream": True})
        metrics = http.get("/metrics").text
    wait_until(lambda: "KeyError" in caplog.text)
    output, errors = capfd.readouterr()
    for text in (caplog.text, output, errors, metrics):
        assert CANARY not in text
    # but that it failed, and where, is there
    assert caplog.text.count("failed with RuntimeError at") == 1
    assert caplog.text.count("failed with KeyError at") == 1
    assert "fake.py" in caplog.text


def test_one_line_per_request_even_for_a_crafted_path(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anaphora.access")
    server = serve()
    with server.http() as http:
        request_id = http.get("/x%0aINFO%20forged?secret=1").headers["x-request-id"]

    def access_lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "anaphora.access"]

    wait_until(lambda: bool(access_lines()))  # it is written after the response has gone out
    server.stop()
    lines = access_lines()
    assert len(lines) == 1
    assert lines[0].startswith("GET /x%0AINFO%20forged 404 ")
    assert lines[0].endswith(request_id)
    assert "secret" not in lines[0]
