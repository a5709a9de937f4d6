"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

import msgspec

from anaphora.server.served import ServedTokenizer
from anaphora.types import TokenLogprob

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot express


def token_label(data: bytes) -> str:
    """A token's text; if its bytes are no whole characters, their values, as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    tokenizer: ServedTokenizer, logprobs: Iterable[TokenLogprob], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``; ``as_ids`` writes tokens as vLLM's ``token_id:5``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        label = id_label(token_id) if as_ids else token_label(data)
        return {"token": label, "bytes": list(data), "logprob": max(logprob, _LOWEST)}

    return [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(*alternative) for alternative in item.top],
        }
        for item in logprobs
    ]


def id_label(token_id: int) -> str:
    """A token by its id, as vLLM's ``return_tokens_as_token_ids`` has it."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    tokenizer: ServedTokenizer, logprobs: Iterable[TokenLogprob]
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``, of each token of a prompt: nothing is known of the first one."""
    entries: list[dict[str, Any] | None] = [None]
    for item in logprobs:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(item.top, start=1)}
        values = {item.token_id: item.logprob, **dict(item.top)}
        entries.append(
            {
                str(token_id): {
                    "logprob": max(logprob, _LOWEST),
                    "rank": ranks.get(token_id),
                    "decoded_token": token_label(tokenizer.token_bytes(token_id)),
                }
                for token_id, logprob in values.items()
            }
        )
    return entries


class CompletionLogprobs:
    """Builds ``choices[].logprobs`` of one completion, all at once or chunk by chunk."""

    def __init__(
        self, tokenizer: ServedTokenizer, *, first_offset: int = 0, as_ids: bool = False
    ) -> None:
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = first_offset  # in characters of the choice's text

    def add_prompt(
        self, first: int, logprobs: Iterable[TokenLogprob], num_top: int, text: str
    ) -> dict[str, Any]:
        """Those for the tokens of a prompt that is echoed as ``text``.

        Of its ``first`` token no log-probability is known. Control tokens are not in the text.
        """
        rest = [msgspec.structs.replace(item, top=item.top[:num_top]) for item in logprobs]
        lists = self.add([TokenLogprob(first, 0.0), *rest], is_prompt=True)
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._offset = len(text)
        return lists

    def add(self, logprobs: Iterable[TokenLogprob], *, is_prompt: bool = False) -> dict[str, Any]:
        """The four parallel lists for further tokens."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for item in logprobs:
            data = self._tokenizer.token_bytes(item.token_id)
            chosen = max(item.logprob, _LOWEST)
            top = {self._label(token_id): max(logprob, _LOWEST) for token_id, logprob in item.top}
            label = self._label(item.token_id)
            lists["tokens"].append(label)
            lists["token_logprobs"].append(chosen)
            lists["top_logprobs"].append(top | {label: chosen})
            lists["text_offset"].append(self._offset)
            is_shown = not is_prompt or self._tokenizer.decode((item.token_id,))
            self._offset += len(self._decoder.decode(data)) if is_shown else 0
        return lists

    def _label(self, token_id: int) -> str:
        if self._as_ids:
            return id_label(token_id)
        return token_label(self._tokenizer.token_bytes(token_id))
