"""docs/ai-functions.md says what the functions take, its examples run, and so does examples/."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from anaphora import LLM, sql
from anaphora.functions.arguments import LANGUAGES, MODEL_PARAMETERS
from anaphora.functions.macros import MACROS
from anaphora.functions.tasks import FUNCTIONS
from anaphora.sql import Registration

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "ai-functions.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def ai() -> Iterator[Registration]:
    with LLM("smollm2", kv_cache_memory=2**27) as llm, duckdb.connect() as con:
        con.execute("CREATE TABLE reviews AS SELECT 'It broke after two days, says Ann.' AS text")
        with sql.register(con, llm) as registration:
            yield registration


def test_every_function_is_there_with_its_arguments() -> None:
    headings = re.findall(r"^### `(\w+)\((.*)\)`$", TEXT, re.MULTILINE)
    assert dict(headings) == {name: macro.parameters for name, macro in MACROS.items()}
    assert [name for name, _ in headings] == list(FUNCTIONS)
    for word in MODEL_PARAMETERS:
        assert re.search(rf"\b{word}\b", TEXT), word
    assert f"Into {', '.join(list(LANGUAGES)[:-1])} or th" in TEXT


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_its_example_runs(name: str, ai: Registration) -> None:
    [query] = [query for query in QUERIES if name in query]
    rows = ai.sql(query).fetchall()
    assert len(rows) == 1
    assert rows[0][0] is not None or name == "ai_extract"


def test_the_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out.count("1 request, ") == 2


def test_the_reviews_are_read() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "reviews.py"), "--reviews", "20"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    words = " ".join(done.stdout.split())
    for shown in ("What the reviews are about", "after how long", "summary", "errorMessage"):
        assert shown in words
    [by_sql, by_pandas] = re.findall(r"(\d+) requests, (\d+) prompt tokens, (\d+) of", words)
    assert int(by_sql[2]) > int(by_sql[1]) / 4
    assert int(by_pandas[0]) < 20 * 2
