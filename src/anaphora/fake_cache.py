"""The prefix cache of ``FakeLLM``: one tier without an end that remembers tokens, and no K or V."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from anaphora.errors import InvalidRequest, UnknownPin
from anaphora.types import (
    CacheAnswer,
    CacheCommand,
    CacheReport,
    CacheScope,
    ListPins,
    MissReason,
    PinInfo,
    PinPrefix,
    PurgeCache,
    PurgeCounts,
)

TIER = "device"


@dataclasses.dataclass(frozen=True)
class _Block:
    block_id: int  # equal for equal tokens after equal parents
    parent_id: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Pin:
    scope: CacheScope
    block_ids: frozenset[int]
    expires: float  # time.monotonic()


class FakeCache:
    """Whole blocks by scope; each scope sees its own."""

    def __init__(self, block_size: int, *, is_enabled: bool = True) -> None:
        self.block_size = block_size
        self.is_enabled = is_enabled
        self._known: dict[CacheScope, dict[int, _Block]] = {}  # parents before their children
        self._pins: dict[str, _Pin] = {}
        self._num_pins = 0  # ever made

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return sum(map(len, self._known.values()))

    @property
    def num_pinned_blocks(self) -> int:
        """Distinct blocks with pins."""
        self._expire()
        return len({(pin.scope, i) for pin in self._pins.values() for i in pin.block_ids})

    def clear(self) -> None:
        """Forget everything, pins too."""
        self._known.clear()
        self._pins.clear()

    def look_up(
        self, scope: CacheScope, prompt: Sequence[int], *, is_scored: bool = False
    ) -> CacheReport:
        """What is known of the prompt's beginning, in whole blocks and never all of it.

        Of one that ``is_scored``, all is computed.
        """
        if is_scored and self.is_enabled:
            return CacheReport(
                hits={TIER: 0}, num_missed_tokens=len(prompt), miss_reason="prompt_logprobs"
            )
        known = self._known.get(scope, {})
        chain = self._chain(prompt[:-1])
        num_found = next((i for i, b in enumerate(chain) if b.block_id not in known), len(chain))
        num_hits = num_found * self.block_size
        reason: MissReason = "no_full_block"
        position = None
        if not self.is_enabled:
            reason = "disabled"
        elif num_found < len(chain):
            missed = chain[num_found]
            siblings = [b for b in known.values() if b.parent_id == missed.parent_id]
            reason = "diverged" if siblings else "never_seen"
            if siblings:
                position = num_hits + max(_num_equal(missed.tokens, b.tokens) for b in siblings)
        return CacheReport(
            hits={TIER: num_hits},
            num_missed_tokens=len(prompt) - num_hits,
            miss_reason=reason,
            first_differing_token=position,
        )

    def remember(self, scope: CacheScope, token_ids: Sequence[int]) -> None:
        """The full blocks of ``token_ids`` can be found from now on."""
        if self.is_enabled:
            known = self._known.setdefault(scope, {})
            for block in self._chain(token_ids):
                known.setdefault(block.block_id, block)

    def command(self, command: CacheCommand) -> CacheAnswer:
        """Purge or pin, without a quota. Raises ``RequestError``."""
        self._expire()
        if isinstance(command, PurgeCache):
            return CacheAnswer(purged={TIER: self._purge(command)})
        if isinstance(command, PinPrefix):
            return CacheAnswer(pins=[self._pin(command)])
        own = [name for name, pin in self._pins.items() if pin.scope.tenant == command.tenant]
        if isinstance(command, ListPins):
            return CacheAnswer(pins=[self._info(name) for name in own])
        if command.pin_id not in own:
            raise UnknownPin(f"there is no pin {command.pin_id!r}; GET /cache/pins lists them")
        del self._pins[command.pin_id]
        return CacheAnswer()

    def _purge(self, command: PurgeCache) -> PurgeCounts:
        num_before = self.num_blocks
        for scope, known in self._known.items():
            if command.tenant not in (None, scope.tenant):
                continue
            if command.adapter not in (None, scope.adapter):
                continue
            if command.prefix is None:
                known.clear()
            elif scope == command.scope:
                gone = {block.block_id for block in self._chain(command.prefix)[-1:]}
                for block in known.values():
                    if block.parent_id in gone:
                        gone.add(block.block_id)
                for block_id in gone & known.keys():
                    del known[block_id]
        self._pins = {
            name: pin
            for name, pin in self._pins.items()
            if pin.block_ids & self._known[pin.scope].keys()
        }
        return PurgeCounts(blocks=num_before - self.num_blocks, in_use=0)

    def _pin(self, command: PinPrefix) -> PinInfo:
        chain = {block.block_id for block in self._chain(command.token_ids)}
        found = frozenset(chain & self._known.get(command.scope, {}).keys())
        if not found:
            raise InvalidRequest("nothing of this prefix is cached; send it as a prompt first")
        self._num_pins += 1
        name = f"pin_{self._num_pins}"
        self._pins[name] = _Pin(command.scope, found, time.monotonic() + command.seconds)
        return self._info(name)

    def _info(self, name: str) -> PinInfo:
        pin = self._pins[name]
        return PinInfo(
            pin_id=name,
            num_tokens=len(pin.block_ids) * self.block_size,
            seconds_left=max(0.0, pin.expires - time.monotonic()),
        )

    def _expire(self) -> None:
        now = time.monotonic()
        self._pins = {name: pin for name, pin in self._pins.items() if pin.expires > now}

    def _chain(self, ids: Sequence[int]) -> list[_Block]:
        chain: list[_Block] = []
        parent_id = 0
        for start in range(0, len(ids) - self.block_size + 1, self.block_size):
            tokens = tuple(ids[start : start + self.block_size])
            chain.append(_Block(hash((parent_id, tokens)), parent_id, tokens))
            parent_id = chain[-1].block_id
        return chain


def _num_equal(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common beginning of two blocks."""
    pairs = enumerate(zip(mine, theirs, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(mine))
