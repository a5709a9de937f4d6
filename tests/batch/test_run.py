"""``anaphora batch``: files in and out, bad rows, interruptions, and what is expected of a plan."""

from __future__ import annotations

import csv
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import Run
from tests.server.running import HELLO, Running, serving

from anaphora import FakeLLM, cli, cli_batch
from anaphora.batch import client as client_module
from anaphora.batch.run import Batch, BatchOptions, Output
from anaphora.batch.work import Entry, WorkFile
from anaphora.errors import ConfigError

TEMPLATE = "{% block system %}Be brief.{% endblock %}{% block user %}Say {{ text }}{% endblock %}"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.01)
    with serving() as serve:
        yield serve(llm=FakeLLM())


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def line(custom_id: str, text: str, **more: Any) -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": text}], "temperature": 0}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": body, **more})


def test_every_row_has_its_answer_in_its_place(run: Run, server: Running, tmp_path: Path) -> None:
    texts = [f"{random.Random(i).choice(['left', 'right'])} number {i % 40}" for i in range(600)]
    source = write_csv(tmp_path / "in.csv", [{"id": i, "text": t} for i, t in enumerate(texts)])
    out = tmp_path / "out.csv"
    status, _, said = run(
        *("batch", "run", str(source), "-o", str(out), "--prompt-template", TEMPLATE),
        *("--url", server.url),
    )
    assert status == 0, said
    found = read_csv(out)
    assert [row["text"] for row in found] == texts
    for row in found:
        assert f"Say {row['text']}" in row["answer"]
        assert row["error"] == ""
        assert int(row["prompt_tokens"]) > int(row["cached_tokens"])
    assert len(server.llm.requests) == len(set(texts))  # equal rows once
    assert server.llm.requests[0].workload == "batch"
    assert "answered by an equal row" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_parquet_keeps_its_columns(run: Run, server: Running, tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    content = pa.table(
        {
            "text": ["one", None, "three"] * 1000,
            "price": pa.array([1, 2, 3] * 1000, pa.decimal128(9, 2)),
        }
    )
    pq.write_table(content, source)
    status, _, said = run(
        *("batch", "run", str(source), "-o", str(out), "--prompt-template", TEMPLATE),
        *("--url", server.url, "--answer-column", "reply"),
    )
    assert status == 0, said
    found = pq.read_table(out)
    assert found.select(["text", "price"]).equals(content)
    errors = found.column("error").to_pylist()
    assert errors[0] is None
    assert errors[1] == "column 'text' is null; write {{ … or '' }} to take it as empty"
    assert found.column("reply").to_pylist()[1] is None
    assert "1,000 × column 'text' is null" in said


def test_whole_requests_come_back_as_openai_has_them(
    run: Run, server: Running, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("a", "hello"),
        line("b", "hello"),
        "{broken",
        line("a", "again"),
        line("", "no id"),
        line("c", "x", url="/v1/embeddings"),
        line("d", "x" * 5000),
        json.dumps({"custom_id": "e", "url": "/v1/completions", "body": {"prompt": "p"}}),
        json.dumps({"custom_id": "f", "body": {"messages": [], "stream": True}}),
        json.dumps({"custom_id": "g", "body": {"model": "gpt-9", "messages": HELLO}}),
    ]
    source.write_text("\n".join(lines), encoding="utf-8")
    status, _, said = run("batch", "run", str(source), "-o", str(out), "--url", server.url)
    assert status == 0, said
    found = read_jsonl(out)
    assert [row["custom_id"] for row in found] == ["a", "b", None, "a", None, *"cdefg"]
    good = found[0]["response"]
    assert good["status_code"] == 200
    assert "hello" in good["body"]["choices"][0]["message"]["content"]
    assert good["body"]["usage"]["prompt_tokens"] > 0
    assert found[1]["response"] == good
    assert len({row["id"] for row in found if row["custom_id"]}) == 8
    messages = [row["error"] and row["error"]["message"] for row in found]
    assert messages[2].startswith("line 3 is not JSON")
    assert messages[3] == "custom_id 'a' is that of row 1; give each row its own"
    assert "custom_id must be a string" in messages[4]
    assert "url is '/v1/embeddings'" in messages[5]
    assert found[6]["response"]["status_code"] == 400
    assert found[6]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert found[7]["response"]["body"]["object"] == "text_completion"
    assert "stream" in messages[8]
    assert found[9]["response"]["status_code"] == 404
    anyway = tmp_path / "anyway.jsonl"
    run("batch", "run", str(source), "-o", str(anyway), "--url", server.url, "--any-model")
    assert read_jsonl(anyway)[9]["response"]["status_code"] == 200


def test_a_schema_gives_objects_or_a_reason(run: Run, server: Running, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n{"n": 1}\n', encoding="utf-8")
    for answer in ('{"a": 1}', "no JSON", '{"a": 12345678901234567890'):
        server.llm.enqueue(answer)
    status, _, said = run(
        *("batch", "run", str(source), "-o", str(out), "--prompt-template", TEMPLATE),
        *("--url", server.url, "--response-schema", SCHEMA, "--max-tokens", "26"),
        *("--concurrency", "1"),
    )
    assert status == 0, said
    found = sorted(read_jsonl(out), key=lambda row: str(row["error"]))
    assert found[0]["answer"] == {"a": 1}
    assert found[1]["error"] is not None
    assert found[1]["error"].endswith("does not know response_format: 'no JSON'…")
    assert [row["answer"] for row in found[1:]] == [None, None, None]
    assert found[2]["error"] is not None
    assert found[2]["error"].startswith("the answer was cut off after 26 tokens")
    assert (
        found[3]["error"] == "the template needs what the row does not have: 'text' is "
        "undefined; it has n"
    )
    assert server.llm.requests[0].params.constraint is not None


def test_rows_can_be_written_as_they_come(run: Run, server: Running, tmp_path: Path) -> None:
    texts = [f"b {i % 7}" for i in range(30)] + [f"a {i}" for i in range(30)]
    source = write_csv(tmp_path / "in.csv", [{"text": text} for text in texts])
    out = tmp_path / "out.csv"
    status, _, said = run(
        *("batch", "run", str(source), "-o", str(out), "--prompt-template", TEMPLATE),
        *("--url", server.url, "--unordered", "--concurrency", "1"),
    )
    assert status == 0, said
    found = read_csv(out)
    assert [row["text"] for row in found] != texts
    assert sorted(row["text"] for row in found) == sorted(texts)
    assert all(f"Say {row['text']}" in row["answer"] for row in found)


def test_files_that_links_lead_to_stay_what_they_are(
    run: Run, server: Running, tmp_path: Path
) -> None:
    source = write_csv(tmp_path / "in.csv", [{"text": "a"}])
    before = source.read_bytes()
    (tmp_path / "out.csv.part").symlink_to(source)
    (tmp_path / "out.csv.work").symlink_to(source)
    start = ("batch", "run", str(source), "-o", str(tmp_path / "out.csv"), "--url", server.url)
    status, _, said = run(*start, "--prompt-template", TEMPLATE, "--overwrite")
    assert status == 0, said
    assert source.read_bytes() == before
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == ["a"]


def test_a_few_rows_for_a_try(run: Run, server: Running, tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": [f"{i}" for i in range(5000)]}), source)
    out = tmp_path / "out.parquet"
    start = ("batch", "run", str(source), "-o", str(out), "--url", server.url)
    status, _, said = run(*start, "--prompt-template", TEMPLATE, "--limit", "3")
    assert status == 0, said
    assert pq.read_table(out).column("text").to_pylist() == ["0", "1", "2"]
    assert len(server.llm.requests) == 3


def test_values_come_back_as_they_can_be_read(run: Run, server: Running, tmp_path: Path) -> None:
    rows = [{"text": "a\rb", "n": "1"}, {"text": 'c "d"', "n": "2"}]
    source = write_csv(tmp_path / "in.csv", rows)
    out = tmp_path / "out.csv"
    status, _, said = run(
        *("batch", "run", str(source), "-o", str(out), "--prompt-template", TEMPLATE),
        *("--url", server.url),
    )
    assert status == 0, said
    assert [row["text"] for row in read_csv(out)] == ["a\rb", 'c "d"']
    odd = tmp_path / "odd.parquet"
    columns = {
        "text": ["x"],
        "nan": [float("nan")],
        "when": pa.array([0], pa.timestamp("us", "UTC")),
        "raw": [b"\xff"],
        "days": pa.array([[1]], pa.list_(pa.date32())),
    }
    pq.write_table(pa.table(columns), odd)
    for suffix in ("jsonl", "csv"):
        status, _, said = run(
            *("batch", "run", str(odd), "-o", str(tmp_path / f"odd.{suffix}")),
            *("--prompt-template", TEMPLATE, "--url", server.url),
        )
        assert status == 0, said
    [found] = read_jsonl(tmp_path / "odd.jsonl")
    assert (found["nan"], found["when"]) == (None, "1970-01-01T00:00:00+00:00")
    assert (found["raw"], found["days"]) == ("/w==", ["1970-01-02"])


def arguments(source: Path, out: Path, url: str, *more: str) -> list[str]:
    options = ["--prompt-template", TEMPLATE, "--url", url, "--concurrency", "4", *more]
    return ["batch", "run", str(source), "-o", str(out), *options]


def begin(context: Any, words: list[str]) -> Any:
    process = context.Process(target=cli.main, args=(words,))
    process.start()
    return process


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "anaphora", *arguments(*words)]


@pytest.mark.parametrize(
    ("times", "more"), [(20, ["--no-usage"]), (6, ["--no-usage", "--unordered"])]
)
def test_killed_again_and_again_the_output_has_the_same_bytes(
    tmp_path: Path, times: int, more: list[str]
) -> None:
    """Kill -9 at random moments, from the start of the process to the writing of its output."""
    chance = random.Random(7)
    context = multiprocessing.get_context("forkserver")  # processes that need not import first
    context.set_forkserver_preload(["anaphora.batch.run", "anaphora.cli_batch"])
    llm = FakeLLM(token_delay=0.0004)
    rows = [{"text": f"{chance.choice(['x', 'y'])} {i % 150}"} for i in range(260)]
    source = write_csv(tmp_path / "in.csv", rows)
    with serving() as serve:
        server = serve(llm=llm)
        whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
        begin(context, arguments(source, whole, server.url, *more)).join()
        num_kills = 0
        while num_kills < times:
            process = begin(context, arguments(source, out, server.url, *more))
            process.join(chance.uniform(0.05, 0.4))
            if process.exitcode is None:
                process.kill()
                process.join()
                num_kills += 1
            elif process.exitcode == 0:  # done before the last kill: once more
                out.unlink()
        if not out.exists() or out.with_name("out.csv.work").exists():
            last = begin(context, arguments(source, out, server.url, *more))
            last.join()
            assert last.exitcode == 0
    if "--unordered" in more:
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    else:
        assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.work*"))


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "in.csv", [{"text": str(i)} for i in range(500)])
    out = tmp_path / "out.csv"
    with serving() as serve:
        server = serve(llm=FakeLLM(token_delay=0.005))
        process = subprocess.Popen(
            command(source, out, server.url), stderr=subprocess.PIPE, text=True
        )
        while not server.llm.requests:
            time.sleep(0.01)
        time.sleep(0.5)
        second = subprocess.run(
            command(source, out, server.url), capture_output=True, text=True, check=False
        )
        anew = subprocess.run(
            command(source, out, server.url, "--overwrite"),
            capture_output=True,
            text=True,
            check=False,
        )
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert second.returncode == 2
    assert "another run is using" in second.stderr
    assert "another run is using" in anew.stderr
    assert process.returncode == 130
    assert "of 500 rows done; run the same command again to go on" in said
    assert not out.exists()
    assert out.with_name("out.csv.work").exists()


def test_a_run_that_is_gone_on_with_must_be_the_same(
    run: Run, server: Running, tmp_path: Path
) -> None:
    source = write_csv(tmp_path / "in.csv", [{"text": "a"}, {"text": "b"}])
    out = tmp_path / "out.csv"
    options = BatchOptions(source=source, template=TEMPLATE)
    batch = Batch(options)
    with client_module.Client(server.url) as client:
        work = WorkFile(Output(batch, out, overwrite=False).work_path)
        work.fill(batch.entries(client, [0]), batch.identity(client))
        work.close()
    start = ("batch", "run", str(source), "-o", str(out), "--url", server.url)
    status, _, said = run(*start, "--prompt-template", TEMPLATE, "--max-tokens", "7")
    assert status == 2
    assert "--max-tokens has changed" in said
    source.write_text("text\nc\n", encoding="utf-8")
    status, _, said = run(*start, "--prompt-template", TEMPLATE)
    assert status == 2
    assert "the input has changed" in said
    assert run(*start, "--prompt-template", TEMPLATE, "--overwrite")[0] == 0
    assert [row["text"] for row in read_csv(out)] == ["c"]
    status, _, said = run(*start, "--prompt-template", TEMPLATE)
    assert status == 2
    assert "no run of it was interrupted; use --overwrite" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["in.csv", "-o", "out.csv"], "say what to ask of each with --prompt-template"),
        (["in.csv", "-o", "out.txt", "--prompt-template", "{{ text }}"], "--output is"),
        (["in.csv", "-o", "out.parquet", "--prompt-template", "{{ text }}"], "only if the input"),
        (["in.csv", "-o", "in.csv", "--prompt-template", "{{ text }}"], "is the input itself"),
        (["in.csv", "-o", "no/out.csv", "--prompt-template", "{{ text }}"], "is no directory"),
        (["in.csv", "-o", "out.csv", "--prompt-template", "{{ txt }}"], "in.csv has text"),
        (["taken.csv", "-o", "o.csv", "--prompt-template", "{{ text }}"], "has a column 'error'"),
        (["in.csv", "-o", "out.csv", "--prompt-template", "hello {% set x = 1 %}"], "no {{ col"),
        (["whole.jsonl", "-o", "out.jsonl", "--max-tokens", "3"], "whole requests"),
        (["whole.jsonl", "-o", "out.csv"], "answers to whole requests are JSONL"),
        (
            ["in.csv", "-o", "o.csv", "--prompt-template", "{{ text }}", "--response-schema", "x"],
            "--response-schema is 'x', which is neither",
        ),
        (
            ["in.csv", "-o", "o.csv", "--prompt-template", "{{ text }}", "--response-schema", "{"],
            "--response-schema is not JSON",
        ),
        (
            [
                "in.csv",
                "-o",
                "o.csv",
                "--prompt-template",
                "{{ text }}",
                "--response-schema",
                '{"type": "objekt"}',
            ],
            "--response-schema cannot be followed",
        ),
        (
            ["in.csv", "-o", "o.csv", "--prompt-template", "{{ text }}", "--temperature", "nan"],
            "--temperature is nan",
        ),
        (["folder.csv", "-o", "o.csv", "--prompt-template", "{{ text }}"], "no regular file"),
        (["in.csv", "-o", "folder.csv", "--prompt-template", "{{ text }}"], "no regular file"),
        (["gone.csv", "-o", "o.csv", "--prompt-template", "{{ text }}"], "No such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "in.csv", [{"text": "a"}])
    (tmp_path / "folder.csv").mkdir()
    write_csv(tmp_path / "taken.csv", [{"text": "a", "error": "b"}])
    (tmp_path / "whole.jsonl").write_text(line("a", "b") + "\n", encoding="utf-8")
    status, _, stderr = run("batch", "run", *arguments, "--url", "http://127.0.0.1:9/v1")
    assert status == 2
    assert stderr.startswith("error: ")
    assert said in stderr
    assert "nobody answers" not in stderr  # it is found before anything is started


def test_if_no_row_could_be_answered_the_status_says_so(
    run: Run, server: Running, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"other": 1}\n[]\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    status, _, _ = run(
        *("batch", "run", str(source), "-o", str(out), "--url", server.url),
        *("--prompt-template", TEMPLATE),
    )
    assert status == 1
    assert len(read_jsonl(out)) == 2


def test_an_empty_file_gives_an_empty_file(run: Run, server: Running, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("text\n", encoding="utf-8")
    status, _, _ = run(
        *("batch", "run", str(source), "-o", str(out), "--url", server.url),
        *("--prompt-template", TEMPLATE),
    )
    assert status == 0
    assert out.read_text(encoding="utf-8").startswith("text,answer,error")


def test_a_plan_tells_hits_before_and_after(run: Run, tmp_path: Path) -> None:
    """The real tokenizer and a cache that is too small for the input's order."""
    kinds = [" ".join(f"{kind}{i}" for i in range(20)) for kind in ("left", "right", "middle")]
    rows = [{"n": i, "kind": kinds[i % 3], "pad": f"{i:03} " * 12} for i in range(18)]
    source = write_csv(tmp_path / "in.csv", rows)
    status, out, said = run(
        *("batch", "plan", str(source), "--kv-cache-memory", "24MiB"),
        *("--prompt-template", "{{ n }}\n{{ kind }}\n{{ pad }}", "--max-tokens", "2"),
    )
    assert status == 0, said
    assert "column order proposed: kind, " in out
    [rates] = [row for row in out.splitlines() if "hit rate" in row]
    shares = [float(x.strip().rstrip("%")) for x in rates.strip("│ ").split("│")[1:]]
    assert shares[0] <= shares[1] < 20 < shares[2]
    assert "expected time" in out
    assert list(tmp_path.iterdir()) == [source]


def test_columns_are_reordered_only_if_that_is_asked_for(
    run: Run, server: Running, tmp_path: Path
) -> None:
    kinds = ["left " * 20, "right " * 20]
    rows = [{"n": i, "kind": kinds[i % 2]} for i in range(20)]
    source = write_csv(tmp_path / "in.csv", rows)
    template = "{% block user %}N: {{ n }}\nKind: {{ kind }}{% endblock %}"
    for number, more in enumerate([[], ["--reorder-columns"]]):
        status, _, said = run(
            *("batch", "run", str(source), "-o", str(tmp_path / f"{number}.csv")),
            *("--prompt-template", template, "--url", server.url, *more),
        )
        assert status == 0, said
    asked = [server.llm.tokenizer.decode(r.prompt_token_ids) for r in server.llm.requests]
    assert all(prompt.index("N: ") < prompt.index("Kind: ") for prompt in asked[:20])
    assert all(prompt.index("N: ") > prompt.index("Kind: ") for prompt in asked[20:])
    found = read_csv(tmp_path / "1.csv")
    assert list(found[0])[:2] == ["n", "kind"]


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work")
    work._db.execute("PRAGMA max_page_count = 40")
    entry = Entry(path="/v1/chat/completions", body={"messages": []}, place=os.urandom(600))
    with pytest.raises(OSError, match="no space is left"):
        work.fill(itertools.repeat(entry, 1000), {})
    work.close()
    again = WorkFile(tmp_path / "work")
    assert not again.is_planned
    again.fill([entry], {"the input": "x"})
    assert again.counts().num_requests == 1
    again.delete()


def test_a_damaged_work_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.csv.work"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="work cannot be used"):
        WorkFile(path)


def test_durations_are_readable() -> None:
    shown = [cli_batch._duration(seconds) for seconds in (0.25, 12, 61, 7384)]
    assert shown == ["0.2 s", "12 s", "1 min 01 s", "2 h 03 min"]
