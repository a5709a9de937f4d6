"""Writes chat.json: templates, conversations and what transformers 5.24.0 renders from them.

    python make_chat.py

The templates are ours; each exercises features that published templates use.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

OUTPUT = Path(__file__).with_name("chat.json")
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

TEMPLATES = {
    "chatml": """\
{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}
""",
    "dated": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\nToday: " + date_string + "\\n" + system_message + "<|im_end|>" }}
{%- if tools is not none and tools %}
    {{- "\\nTools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- "<tool>" ~ call.name ~ "(" }}
            {%- for key, value in call.arguments | items %}
                {{- key ~ "=" ~ value | tojson }}
                {%- if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}
            {{- ")" + eos_token }}
        {%- endfor %}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|im_start|>tool\\n" + message.content | trim + "<|im_end|>" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
""",
    "macros": """\
{%- macro render(message, depth=0) -%}
    {{- '[' ~ message.role | upper ~ ' ' ~ depth ~ ']' -}}
    {%- if message.content is string -%}
        {{- message.content.strip().split('</think>')[-1].lstrip('\\n') -}}
    {%- elif message.content is none -%}
        {{- 'nothing' -}}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0, last='') -%}
{%- for message in messages[::-1] -%}
    {%- if message.role == 'user' -%}
        {%- set ns.last = message.content -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages if message.role != 'tool' -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- if loop.index0 % 2 == 1 -%}
        {%- generation -%}{{- render(message, loop.depth) -}}{%- endgeneration -%}
    {%- else -%}
        {{- render(message, ns.count * 10) | indent(2) -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{{- ns.last | replace('a', 'A') | length -}}
{{- messages | map(attribute='role') | join(',') -}}
{{- messages | selectattr('role', 'equalto', 'user') | list | count -}}
{{- ('%s of %d' | format('x', 2)) ~ (tools | tojson) ~ {'b': '<é>', 'a': none} | tojson -}}
{{- messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | unique | sort -}}
{{- [1, 2.5, true, none] ~ (style | default('plain')) -}}
""",
    "strict": """\
{%- if messages[0].role == 'system' -%}
    {{- raise_exception('System role not supported') -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user/assistant/...') -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ ' ' ~ message.content -}}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif -%}
""",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a <city> & its surroundings: 'é'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 2}},
}
USER = {"role": "user", "content": "  Hello <b>there</b> & 'you'\n"}
ASSISTANT = {"role": "assistant", "content": "Well, <think>hm</think>\nhi é👍 "}
SYSTEM = {"role": "system", "content": " You are\n\ta test. "}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "many": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": ""}],
    "no system": [USER, ASSISTANT, USER],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"t": 21}'},
    ],
    "continued": [USER, ASSISTANT],
}


def main() -> None:
    """Write the file."""
    cases = []
    for template, source in TEMPLATES.items():
        for name, messages in CONVERSATIONS.items():
            for extra in ({}, {"style": "loud", "date_string": "then"}):
                options = {
                    "add_generation_prompt": name not in ("continued", "no system"),
                    "continue_final_message": name == "continued",
                    "tools": TOOLS if name == "tools" else None,
                }
                try:
                    rendered, _ = render_jinja_template(
                        [messages], chat_template=source, **options, **SPECIAL, **extra
                    )
                    expected = rendered[0]
                except Exception:
                    expected = None  # rejected
                case = {"template": template, "conversation": name, "kwargs": extra}
                cases.append(case | {"options": options, "expected": expected})
    golden = {
        "date": datetime.date.today().isoformat(),
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "cases": cases,
    }
    OUTPUT.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
