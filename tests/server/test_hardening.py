"""TLS, clients that do not read, the end of a server, foreign web pages, log lines and traces."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from anaphora import logs
from anaphora.errors import ConfigError
from anaphora.fake import FakeLLM
from anaphora.server import listen
from anaphora.server.listen import Tls
from tests.server.running import HELLO, check_error, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=3))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    pkcs8 = serialization.PrivateFormat.PKCS8
    plain, secret = folder / "key.pem", folder / "locked.pem"
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    plain.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    locked = serialization.BestAvailableEncryption(b"password")
    secret.write_bytes(key.private_bytes(pem, pkcs8, locked))
    return folder


def test_tls_files_that_do_not_fit_are_named(certificate):
    good = certificate / "cert.pem"
    for cert, key in [
        (good, certificate / "none.pem"),
        (good, good),
        (certificate / "key.pem", certificate / "key.pem"),
        (good, certificate / "locked.pem"),
    ]:
        with pytest.raises(ConfigError, match=r"--ssl-certfile .* without a password"):
            Tls(cert, key)


def test_over_tls(serve, certificate):
    server = serve(tls=Tls(certificate / "cert.pem", certificate / "key.pem"))
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate / "cert.pem")
    with server.http(verify=context) as http:
        body = {"model": "fake", "messages": HELLO, "max_tokens": 3, "stream": True}
        assert http.post(CHAT, json=body).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health", timeout=5)
    with server.http(verify=context) as http:
        assert http.get("/health").status_code == 200


def test_a_client_that_does_not_read_is_cut_off_and_costs_nobody(serve, monkeypatch):
    monkeypatch.setattr(listen, "_READ_SECONDS", 0.5)
    server = serve(llm=FakeLLM(max_model_len=100_000))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    parts = urlsplit(server.url)
    sock.connect((parts.hostname, parts.port))
    body = {"model": "fake", "messages": HELLO, "max_tokens": 90_000, "stream": True,
            "ignore_eos": True}  # fmt: skip
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    with server.http() as http:
        for _ in range(10):
            answer = http.post(CHAT, json={"model": "fake", "messages": HELLO, "max_tokens": 2})
            assert answer.status_code == 200
    wait_until(lambda: bool(server.llm.aborted))
    sock.close()


def test_a_server_that_is_ending_hands_back_what_is_new_and_finishes_what_runs(serve):
    server = serve(llm=FakeLLM(token_delay=0.05))
    answers = []

    def ask():
        with server.http() as http:
            body = {"model": "fake", "messages": HELLO, "max_tokens": 20}
            answers.append(http.post(CHAT, json=body))

    running = threading.Thread(target=ask)
    running.start()
    wait_until(lambda: bool(server.llm.requests))
    with server.http() as http:  # a connection that lives on
        assert http.get("/ready").status_code == 200
        server.app.state.service.drain.is_draining = True
        assert http.get("/health").status_code == 200
        check_error(http.get("/ready"), 503)
        response = http.post(CHAT, json={"model": "fake", "messages": HELLO})
        assert check_error(response, 503)["code"] == "server_is_overloaded"
        assert response.headers["retry-after"] == "1"
    running.join()
    assert answers[0].status_code == 200


def test_no_web_page_may_read_answers_unless_the_operator_says_so(serve):
    origin = {"origin": "https://chat.example.com"}
    asks = {**origin, "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    closed = serve("key")
    with closed.http(headers={"authorization": ""}) as http:
        check_error(http.options(CHAT, headers=asks), 401)
    with closed.http() as http:
        response = http.get("/v1/models", headers=origin)
        assert not [name for name in response.headers if name.startswith("access-control")]
    opened = serve("key", cors_origins=["https://chat.example.com"])
    with opened.http(headers={"authorization": ""}) as http:
        response = http.options(CHAT, headers=asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
        other = http.options(CHAT, headers={**asks, "origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers
        check_error(http.get("/v1/models", headers=origin), 401)  # it is no way around the key


def test_each_request_is_one_json_line_without_content(serve, caplog):
    caplog.set_level(logging.INFO, logger="anaphora.access")
    server = serve("team=secret-key")
    with server.http() as http:
        body = {"model": "fake", "messages": HELLO * 20, "max_tokens": 3}
        request_id = http.post(CHAT, json=body).headers["x-request-id"]
    wait_until(lambda: any(r.name == "anaphora.access" for r in caplog.records))
    [record] = [r for r in caplog.records if r.name == "anaphora.access"]
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert datetime.datetime.fromisoformat(line["time"]).tzinfo is not None
    assert line["ttft"] <= line["seconds"]
    kept = {name: line[name] for name in ("level", "logger", "method", "path", "status", "tenant")}
    assert kept == {"level": "INFO", "logger": "anaphora.access", "method": "POST", "path": CHAT,
                    "status": 200, "tenant": "team"}  # fmt: skip
    assert (line["request_id"], line["endpoint"], line["class"]) == (
        request_id, "fake", "interactive",
    )  # fmt: skip
    assert (line["output_tokens"], line["cached_tokens"]) == (3, 0)
    assert "hello" not in text
    assert "secret" not in text


def test_what_a_message_holds_cannot_break_a_line():
    record = logging.LogRecord("a", logging.ERROR, "f", 1, 'two\nlines "%s"', ("\x00\ud800",), None)
    assert len(logs.JsonFormatter().format(record).splitlines()) == 1


@pytest.mark.parametrize(("given", "is_json"), [("json", True), ("auto", True), ("text", False)])
def test_formats_of_log_lines(given, is_json):
    code = (
        "import logging, anaphora.logs as logs\n"
        f"logs.configure_logging({given!r})\nlogging.getLogger('x').warning('hello')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("{") == is_json
    assert "hello" in done.stderr


class Collector:
    """An OTLP collector that remembers which bytes it was sent."""

    def __init__(self):
        self.bodies = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}/v1/traces"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                data = b""
                while b"\r\n\r\n" not in data:
                    data += sock.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                while len(body) < length:
                    body += sock.recv(65536)
                self.bodies.append(body)
                sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                sock.close()

    def close(self):
        self._server.close()


def test_spans_reach_a_collector_and_continue_the_callers_trace(serve, monkeypatch):
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from anaphora.server.tracing import Tracing

    memory = InMemorySpanExporter()
    tracing = Tracing("http://unused", exporter=memory)
    server = serve("team=secret-key", tracing=tracing)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with server.http() as http:
        body = {"model": "fake", "messages": HELLO * 20, "max_tokens": 3}
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        http.post(CHAT, json=body, headers=headers)
        http.get("/nowhere")

    def spans():
        tracing._provider.force_flush()
        return memory.get_finished_spans()

    wait_until(lambda: len(spans()) == 2)
    tracing.close()
    first, second = memory.get_finished_spans()
    assert format(first.context.trace_id, "032x") == trace_id
    assert first.name == f"POST {CHAT}"
    found = first.attributes
    assert found["gen_ai.request.model"] == "fake"
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["http.response.status_code"] == 200
    assert found["anaphora.tenant"] == "team"
    assert second.name == "GET none"
    encoded = encode_spans([first, second]).SerializeToString()
    assert b"hello" not in encoded
    assert b"secret" not in encoded
    collector = Collector()
    real = Tracing(collector.url)
    with real.span({"method": "GET", "headers": []}) as span:
        real.describe(span, "/x", 500, "id", None)
    real.close()
    wait_until(lambda: bool(collector.bodies))
    collector.close()


def test_a_clock_that_is_set_changes_no_limit_and_no_deadline(serve, monkeypatch):
    """Only what has to survive a restart looks at the wall's clock."""
    from anaphora.server.endpoints import Endpoint
    from anaphora.server.registry import LimitTerms

    limited = Endpoint(name="fake", limits=LimitTerms(requests_per_minute=1))
    server = serve(endpoints=[limited])
    body = {"model": "fake", "messages": HELLO, "max_tokens": 2}
    with server.http() as http:
        assert http.post(CHAT, json=body).status_code == 200
        real = time.time
        for step in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda step=step: real() + step)
            check_error(http.post(CHAT, json=body), 429)
