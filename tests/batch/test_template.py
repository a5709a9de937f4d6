"""A template becomes a chat for each row, or says which column is to blame."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from anaphora.batch.template import PromptTemplate
from anaphora.errors import ConfigError, InvalidRequest

BOTH = """{% block system %}
Classify.
{% endblock %}
{% block user %}Title: {{ title }}
Brand: {{ brand }}
Text: {{ text }}{% endblock %}"""


def test_blocks_are_the_parts_of_a_chat() -> None:
    row = {"title": "Kettle", "brand": "Acme", "text": "hot <b>&</b>"}
    assert PromptTemplate(BOTH).messages(row) == [
        {"role": "system", "content": "Classify."},
        {"role": "user", "content": "Title: Kettle\nBrand: Acme\nText: hot <b>&</b>"},
    ]


def test_without_blocks_all_of_it_is_the_users() -> None:
    messages = PromptTemplate("Sum up: {{ text }}").messages({"text": "a\nb"})
    assert messages == [{"role": "user", "content": "Sum up: a\nb"}]


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("Say {{ word }}", encoding="utf-8")
    assert PromptTemplate.of(str(path)).columns == {"word"}
    with pytest.raises(ConfigError, match="no file that can be read"):
        PromptTemplate.of(str(tmp_path / "other.jinja"))


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (True, "true"),
        (1.5, "1.5"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),
        ("", ""),
        ("{{ nothing }}", "{{ nothing }}"),
    ],
)
def test_values_are_printed_as_people_write_them(value: Any, printed: str) -> None:
    [message] = PromptTemplate("<{{ x }}>").messages({"x": value})
    assert message["content"] == f"<{printed}>"


@pytest.mark.parametrize(
    ("source", "row", "said"),
    [
        ("{{ x }}", {"x": None}, r"column 'x' is null; write \{\{ … or '' \}\}"),
        ("{{ x }}", {"x": [1]}, "column 'x' holds a list or an object; write .* tojson"),
        ("{{ x }}", {"x": b"1"}, "column 'x' holds bytes"),
        ("{{ x }}{{ y }}", {"y": 1}, "'x' is undefined; it has y"),
        ("{{ x.upper() }}", {"x": 7}, "fails on this row|has no attribute"),
        ("{{ x }}", {"x": "  "}, "user part is empty"),
        ("{{ x + 1 }}", {"x": "one"}, "the template fails on this row"),
    ],
)
def test_a_row_that_does_not_fit_says_why(source: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        PromptTemplate(source).messages(row)


def test_a_column_of_any_name_can_be_used() -> None:
    template = PromptTemplate("{{ row['Review Text'] }}\nSelf: {{ row['self'] }}")
    assert template.columns == {"Review Text", "self"}
    row = {"Review Text": "good", "self": 1, "row": 2}
    with pytest.raises(InvalidRequest):  # a column of that name comes first
        template.messages(row)
    del row["row"]
    assert template.messages(row)[0]["content"] == "good\nSelf: 1"
    assert [list(run) for run in template.column_lines] == [["Review Text", "self"]]
    with pytest.raises(ConfigError, match="no plain word"):
        PromptTemplate("{{ Review Text }}")


def test_a_template_can_take_what_is_missing_as_empty() -> None:
    template = PromptTemplate("<{{ x or '' }}|{{ y | tojson }}>")
    assert template.messages({"x": None, "y": {"a": [1]}})[0]["content"] == '<|{"a": [1]}>'


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ x", "cannot be read"),
        ("{% block other %}{{ x }}{% endblock %}", "has the block 'other'"),
        ("{% block system %}{{ x }}{% endblock %}", "no user block"),
        ("Hello {% block user %}{{ x }}{% endblock %}", "outside its blocks"),
        ("{{ y }}{% block user %}{{ x }}{% endblock %}", "outside its blocks"),
        ("{% include 'x' %}{{ y }}", "fails|include|cannot be read"),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused(source: str, said: str) -> None:
    with pytest.raises((ConfigError, InvalidRequest), match=said):
        PromptTemplate(source).messages({"x": 1, "y": 2})


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(InvalidRequest):
        PromptTemplate("{{ x.__class__.__mro__[1].__subclasses__() }}").messages({"x": "a"})


def test_lines_with_one_column_each_change_places() -> None:
    template = PromptTemplate(BOTH)
    assert [list(run) for run in template.column_lines] == [["title", "brand", "text"]]
    other = template.reordered([["brand", "text", "title"]])
    row = {"title": "Kettle", "brand": "Acme", "text": "hot"}
    assert other.messages(row)[1]["content"] == "Brand: Acme\nText: hot\nTitle: Kettle"
    assert other.messages(row)[0] == template.messages(row)[0]


def test_only_neighbours_of_one_column_each_may_move() -> None:
    source = "{{ a }}\n{{ b }} {{ c }}\n{{ d }}\n{% if e %}\n{{ f }}\n{% endif %}\nG: {{ g }}\nx"
    assert PromptTemplate(source).column_lines == []
    runs = PromptTemplate("A {{ a }}\nB {{ b }}\n\nC {{ c }}\nD {{ d }}\nD {{ d }}").column_lines
    assert [list(run) for run in runs] == [["a", "b"], ["c", "d"]]
