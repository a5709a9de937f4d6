from __future__ import annotations

import time

import pytest

from anaphora.errors import CorruptCheckpoint, InvalidRequest
from anaphora.text.chat import ChatTemplate
from tests.text.tiny import golden_tokenizer

TOKENIZER = golden_tokenizer("gpt-2")
USER = [{"role": "user", "content": "hello"}]

BOMBS = {
    "constant product": "{{ 'x' * 1000000000 }}",
    "computed product": "{{ 'x' * 10**9 }}",
    "product of a list": "{% set a = [1] * 1000000000 %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loop over texts": "{% for i in range(400000) %}{{ 'x' * 1000 }}{% endfor %}",
    "filtered loop": "{% set a = range(1000) | list %}{% for i in a %}{% for j in a if false %}"
    "{% endfor %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling with +": "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "tower printed": "{% set n = namespace(s=['a']) %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "tower as JSON": "{% set n = namespace(s=['a']) %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
    "macro capture": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='ab') %}"
    "{% for i in range(99) %}{% set n.s = f(n.s) %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "huge numbers": "{{ ('f' * 100000) | int(0, 16) // 7 }}",
    "sorting again": "{% set l = range(100000) | list %}{% for i in range(5000) %}"
    "{% set x = l | sort %}{% endfor %}",
    "copying filter": "{% set n = namespace(l=[]) %}{% set x = 'x' * 9000000 %}"
    "{% for i in range(150) %}{% set n.l = n.l + [x | upper] %}{% endfor %}",
    "copying slice": "{% set n = namespace(l=[]) %}{% set x = 'x' * 9000000 %}"
    "{% for i in range(150) %}{% set n.l = n.l + [x[1:]] %}{% endfor %}",
    "counting words": "{% set x = 'a ' * 8000000 %}{% for i in range(20) %}{{ x | wordcount }}"
    "{% endfor %}",
    "date format": "{{ strftime_now('%Y' * 300000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' | format(1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
    "join": "{{ ('x' * 1000000).join(['a'] * 1000000) }}",
    "join filter": "{{ (['a'] * 1000000) | join('x' * 1000000) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000000000) }}",
    "indent text": "{{ ('\n' * 1000000) | indent('x' * 1000000) }}",
    "tojson indent": "{{ [1] | tojson(indent=1000000000) }}",
    "power": "{{ 9 ** 999999999 }}",
    "powers": "{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}"
    "{% endfor %}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_work_is_bounded(source: str) -> None:
    template = ChatTemplate(source, TOKENIZER)
    start = time.process_time()
    with pytest.raises(InvalidRequest) as error:
        template.render(USER)
    assert error.value.param == "messages"
    assert time.process_time() - start < 10


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "attr": "{{ messages | attr('__class__') | string | length + messages.foo.bar }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
    "include": "{% include 'other' %}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
}


@pytest.mark.parametrize("name", ["raise_exception.__globals__", "''.__class__", "range.__self__"])
def test_unsafe_attributes_print_as_nothing(name: str) -> None:
    assert ChatTemplate("{{ " + name + " }}", TOKENIZER).render(USER) == ""


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_templates_cannot_reach_python(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, TOKENIZER).render(USER)


BROKEN = {
    "unfinished": "{% if",
    "unknown filter": "{{ 1 | nosuch }}",
    "stray end": "{% endfor %}",
    "no end": "{% generation %}",
    "amplifying filter": "{{ 'a' | center(9) }}",
    "too deep": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "too long": "x" * (2**20 + 1),
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_a_template_that_does_not_compile_is_the_checkpoints_fault(source: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="chat template"):
        ChatTemplate(source, TOKENIZER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('No <b>system</b> role') }}", "No <b>system</b> role"),
        ("{{ messages[0].foo.bar }}", "foo"),
        ("{{ messages[0].role + 5 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ {}['x'].y }}", "x"),
        ("{{ nothing() }}", "nothing"),
    ],
)
def test_rejections_say_why(source: str, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        ChatTemplate(source, TOKENIZER).render(USER)


def test_a_long_conversation_fits_the_bounds() -> None:
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}"
        "{% set n.text = n.text ~ '<' ~ m.role ~ '>' ~ m.content %}{% endfor %}{{ n.text }}"
    )
    messages = [{"role": "user", "content": "x" * 1000} for _ in range(500)]
    assert len(ChatTemplate(source, TOKENIZER).render(messages)) == 500 * 1006
