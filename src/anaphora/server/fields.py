"""Request fields that are refused, and those accepted without effect. Each says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anaphora.server.envelope import unsupported
from anaphora.types import Workload

# A client may only lower itself: "flex" and "batch" do. "priority" and "scale" are for sale
# elsewhere; here they mean "default".
ServiceTier = Literal["auto", "default", "standard_only", "priority", "scale", "flex", "batch"]
BATCH_TIERS: tuple[ServiceTier, ...] = ("flex", "batch")
SERVED_TIERS: Mapping[Workload, str] = {
    "provisioned": "priority",
    "interactive": "default",
    "batch": "flex",
}

# Field → the values that ask for nothing. Any other value would change the answer's meaning.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),  # chats have them; see server/tools.py
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "web_search_options": (None,),
    "store": (None, False),  # nothing is kept here
    "prompt_cache_options": (None, {}, {"mode": "implicit"}, {"mode": "implicit", "ttl": "30m"}),
    "echo": (None, False),  # in chat; completions declare it
    "best_of": (None,),  # as echo
    "suffix": (None, ""),  # as echo
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None, []),
    "spaces_between_special_tokens": (None, True),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "logits_processors": (None, []),
    "documents": (None, []),
    "add_special_tokens": (None, False),  # in chat, where the template writes them
    "chat_template": (None,),  # a template is a program; the operator chooses it
    "mm_processor_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "priority": (None, 0),
    "kv_transfer_params": (None, {}),
    # llama.cpp's and TGI's names for what OpenAI has no name for, or another one
    "grammar": (None, ""),
    "json_schema": (None, {}),
    "repeat_penalty": (None, 1),
    "n_predict": (None, -1),
    "max_new_tokens": (None,),
    "typical_p": (None, 1),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "samplers": (None, []),
    "cache_prompt": (None, True),
}

# Field → why it can be ignored. Fields in neither table are ignored too: new clients send new ones.
ACCEPTED_WITHOUT_EFFECT: Mapping[str, str] = {
    "user": "names an end user for abuse reports; it is not logged",
    "safety_identifier": "as user",
    "metadata": "labels for OpenAI's dashboard",
    "store": "false, which is what always holds",
    "parallel_tool_calls": "an answer has one call",
    "tools[].function.strict": "calls that are forced always match, others are the model's own",
    "response_format.json_schema.strict": "answers always match",
    "structured_outputs.disable_fallback": "there is one backend",
    "stream_options.include_obfuscation": "hides lengths; padding TLS records does too",
    "verbosity": "the models served have one verbosity",
    "prompt_cache_retention": "how long others may keep a prefix; here the operator decides",
    "prompt_cache_options": "implicit mode, which is what always holds",
    "messages[].content[].cache_control": "prefixes are found without marks",
    "messages[].content[].prompt_cache_breakpoint": "prefixes are found without marks",
    "request_id": "the server names requests itself, see the x-request-id header",
}


def refuse_unsupported(extra: Mapping[str, Any], why: str = "leave it out") -> None:
    """Raise ``InvalidRequest`` for the first field that asks for something not built."""
    for field, value in extra.items():
        neutral = UNSUPPORTED.get(field)
        if neutral is not None and not any(_same(value, allowed) for allowed in neutral):
            raise unsupported(field, why)


def _same(value: Any, allowed: Any) -> bool:
    # 0 == False in Python but not in JSON
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
