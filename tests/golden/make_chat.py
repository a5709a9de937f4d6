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
    # As Gemma's: no role for a system message, which begins the first user's; strict turns.
    "gemma": """\
{{ bos_token }}
{%- set ns = namespace(prefix='', turns=messages) -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.prefix = messages[0]['content'] + '\n\n' -%}
    {%- set ns.turns = messages[1:] -%}
{%- endif -%}
{%- for message in ns.turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (ns.prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    # As Llama 3.1's: functions as JSON in the first user's message, one call in a message.
    "llama3": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set system_message = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\n\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": its arguments}.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    # As GPT-OSS's: a date and an effort at the front, channels, reasoning only before a call.
    "harmony": """\
{%- macro signature(tool) -%}
    {{- '// ' + tool.description + '\n' + 'type ' + tool.name + ' = (_: {\n' }}
    {%- for name, spec in tool.parameters.properties.items() %}
        {{- name ~ ('' if name in (tool.parameters.required or []) else '?') }}
        {{- ': ' + spec.type + ',\n' }}
    {%- endfor %}
    {{- '}) => any;\n\n' }}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}
{{- 'Reasoning: ' + reasoning_effort + '\n\n# Valid channels: analysis, commentary, final.' }}
{{- '<|end|>' }}
{%- set turns = messages %}
{%- set developer = '' %}
{%- if messages[0].role == 'system' or messages[0].role == 'developer' %}
    {%- set developer = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + developer }}
    {%- if tools %}
        {{- '\n\n# Tools\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}{{- signature(tool.function) }}{%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set later = namespace(found=false) %}
        {%- for other in turns[loop.index:] %}
            {%- if other.role == 'assistant' and 'tool_calls' not in other %}
                {%- set later.found = true %}
            {%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking with tool calls!') }}
        {%- elif (message.content or message.thinking) and not later.found %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {%- if '<|channel|>' in message.content %}
            {{- raise_exception('Pass the reasoning as thinking, not in the content.') }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}
            {{- raise_exception('A tool message needs a tool call before it.') }}
        {%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
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
CHANGES = {"style": "loud", "date_string": "then", "reasoning_effort": "high"}
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
    "one call": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "thinking": "Ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "a"},
    ],
    "after a call": [
        USER,
        {"role": "assistant", "content": "", "thinking": "Ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "a"},
        {"role": "assistant", "content": "It has 21 degrees."},
        {"role": "user", "content": "And now?"},
    ],
    "continued": [USER, ASSISTANT],
}


def main() -> None:
    """Write the file."""
    cases = []
    for template, source in TEMPLATES.items():
        for name, messages in CONVERSATIONS.items():
            for extra in ({}, CHANGES):
                options = {
                    "add_generation_prompt": name not in ("continued", "no system"),
                    "continue_final_message": name == "continued",
                    "tools": TOOLS if "call" in name or name == "tools" else None,
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
