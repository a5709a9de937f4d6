"""The engine: requests of token ids in, tokens out, a step at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import msgspec

from anaphora.cache.disk import DiskStorage
from anaphora.cache.disk_key import hash_secret, read_key_file
from anaphora.cache.eviction import POLICIES
from anaphora.cache.hashing import HASH_BYTES, BlockHasher
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.shares import Owner, parse_shares
from anaphora.cache.tiers import Tier
from anaphora.cache.windows import Window
from anaphora.config import EngineConfig
from anaphora.engine import sampler
from anaphora.engine.accounts import Accounts
from anaphora.engine.adapters import LoadedAdapters
from anaphora.engine.audit import Auditor
from anaphora.engine.grammar import Grammars, Mask, Matcher
from anaphora.engine.memory import create_storages, plan_max_model_len, plan_num_blocks
from anaphora.engine.runner import ModelRunner
from anaphora.engine.scheduler import Scheduler
from anaphora.engine.sequence import Sequence
from anaphora.errors import NoTokenLeft, RequestError, UnknownPin
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.sources import packed_dir
from anaphora.machine import usable_cores
from anaphora.models.registry import load_model
from anaphora.ops.api import Array, Ops
from anaphora.ops.kv_store import KVLayout
from anaphora.ops.native import NativeOps
from anaphora.types import (
    CacheCommand,
    EngineAnswer,
    EngineCommand,
    EngineRequest,
    EngineStats,
    FinishReason,
    ListPins,
    LoadAdapter,
    ModelInfo,
    PinPrefix,
    PurgeCache,
    SequenceOutput,
    TierCounters,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

_LOAD_WAIT_SECONDS = 0.005  # then new messages are looked at
_LONG_PROMPT = 2048  # tokens; hashing shorter ones takes less than 0.2 ms
_FLUSH_SECONDS = 3.0  # at the end; whoever ended us waits for five


class Engine:
    """One model with its cache and its scheduler. Not thread-safe: one loop owns it.

    ``config.model`` is the path of a checkpoint. Raises ``ModelError`` and ``ConfigError``.
    """

    def __init__(
        self,
        config: EngineConfig,
        public_prefixes: Iterable[list[int]] = (),
        *,
        ops: Ops | None = None,
    ) -> None:
        threads = config.threads or usable_cores()
        ops = ops or NativeOps(config.dtype, threads)
        with open_checkpoint(Path(config.model)) as checkpoint:
            model = load_model(checkpoint, ops, packed_dir())
            weights_digest, name = checkpoint.digest, checkpoint.name
            num_parameters = checkpoint.num_parameters
        layout = KVLayout.of_windows(
            model.config.layer_windows,
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            block_size=config.block_size,
            dtype=config.resolved_kv_cache_dtype,
        )
        self.adapters = LoadedAdapters(model, config)
        num_blocks = plan_num_blocks(
            config,
            weight_bytes=model.sizes.weight_bytes,
            block_bytes=layout.block_bytes,
            adapter_bytes=self.adapters.reserved_bytes,
        )
        window = None
        if layout.num_window_tables:
            window = Window(
                num_tokens=max(model.config.layer_windows),
                num_pages=layout.num_window_tables,
                block_size=config.block_size,
                is_ragged=layout.is_ragged,
                max_chunk=config.max_num_batched_tokens,
            )
        max_model_len = plan_max_model_len(
            config,
            max_position_embeddings=model.config.max_position_embeddings,
            num_blocks=num_blocks,
            window=window,
        )
        model.set_max_model_len(max_model_len)
        # What decides the bits in a block besides its tokens, tenant and adapter.
        model_fields = {
            "weights": weights_digest,
            "dtype": config.dtype.encode(),
            "kv_dtype": layout.dtype.encode(),
            "block_size": layout.block_size.to_bytes(4, "little"),
        }
        if window is not None:
            model_fields["pages"] = repr(layout.places).encode()
        disk_key, secret = None, os.urandom(HASH_BYTES)
        if config.disk_cache_key_file is not None:  # blocks have to be found after a restart
            disk_key = read_key_file(Path(config.disk_cache_key_file))
            secret = hash_secret(disk_key)
        kv_bytes = num_blocks * layout.block_bytes
        # Below tier 1 a block's window part lies beside it.
        whole_bytes = layout.block_bytes * (1 + layout.num_window_tables)
        storages = create_storages(
            config,
            taken_bytes=model.sizes.weight_bytes + self.adapters.reserved_bytes + kv_bytes,
            block_bytes=whole_bytes,
            disk_key=disk_key,
            identity=BlockHasher(secret, model_fields).root({}),
        )
        self.info = ModelInfo(
            name=name,
            architecture=model.config.model_type,
            num_parameters=num_parameters,
            num_multiplied_weights=model.sizes.num_multiplied_weights,
            num_head_weights=model.sizes.num_head_weights,
            vocab_size=model.config.vocab_size,
            max_model_len=max_model_len,
            dtype=config.dtype,
            kv_cache_dtype=layout.dtype,
            block_size=config.block_size,
            num_blocks=num_blocks,
            weight_bytes=model.sizes.weight_bytes,
            step_weight_bytes=model.sizes.step_weight_bytes,
            kv_cache_bytes=kv_bytes,
            tier_bytes={
                "device": kv_bytes,
                **{name: tier.num_slots * whole_bytes for name, tier in storages.items()},
            },
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            threads=threads,
            kernels=ops.name,
            max_loras=config.num_adapters,
            max_lora_rank=config.max_lora_rank,
            adapter_bytes=self.adapters.reserved_bytes,
            sliding_window=0 if window is None else window.num_tokens,
            num_window_blocks=layout.num_window_tables,
        )
        store = ops.create_kv_store(layout, num_blocks, lock=config.lock_memory)
        self.runner = ModelRunner(model, store)
        self._block_bytes = whole_bytes
        self.cache = CacheManager(
            Hierarchy(
                num_blocks,
                store,
                storages,
                shares=parse_shares(config.cache_share),
                new_policy=POLICIES[config.eviction_policy],
                reserve=-(-config.max_num_batched_tokens // config.block_size)
                + config.max_num_seqs,
                window=window,
            ),
            config.block_size,
            BlockHasher(secret, model_fields),
            enable_caching=config.enable_prefix_caching,
            public_prefixes=list(public_prefixes),
            pin_quota=config.pin_quota,
        )
        if isinstance(disk := storages.get("disk"), DiskStorage):
            self.cache.hierarchy.restore("disk", disk.entries())
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            accounts=Accounts(config.weights, config.bought_capacity, time.monotonic()),
        )
        self.auditor = Auditor(
            self.cache, self.runner, config.audit_hits, config.max_num_batched_tokens
        )
        if config.audit_hits:
            self.scheduler.on_start = self.auditor.sample
            self.scheduler.reclaim = self.auditor.cancel
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        self._requests: dict[str, list[Sequence]] = {}
        self._hashing = futures.ThreadPoolExecutor(1, "hashing")
        self.grammars = Grammars(model.config.vocab_size, self._eos_token_ids)
        self._compiling = futures.ThreadPoolExecutor(1, "grammars")
        self._compiled: dict[str, futures.Future[Matcher]] = {}
        # Requests whose long prompt is being hashed, or whose constraint is being compiled.
        self._arriving: dict[str, list[futures.Future[Any]]] = {}
        self._failed: list[SequenceOutput] = []  # on their way; told by the next step
        self._is_persistent = config.disk_cache_persist
        self._num_steps = 0
        self._num_computed_tokens = 0

    def add(self, request: EngineRequest) -> None:
        """Queues a request's choices. Raises ``RequestError`` and then has changed nothing."""
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        longest = self.info.max_model_len - len(request.prompt_token_ids)
        scope, max_tokens = request.scope, request.params.max_tokens
        owner = Owner(scope.tenant, request.workload, scope.adapter)
        account = self.scheduler.accounts.of(owner, request.endpoint)
        urgent_at = None
        if request.urgent_in is not None:
            urgent_at = self.scheduler.clock() + request.urgent_in
        choices = [
            Sequence(
                request.request_id,
                index,
                request.prompt_token_ids,
                request.params,
                self.cache.root(scope),
                max_tokens=longest if max_tokens is None else min(max_tokens, longest),
                owner=owner,
                account=account,
                endpoint=request.endpoint,
                urgent_at=urgent_at,
                num_public_blocks=self.cache.num_public_blocks(request.prompt_token_ids, scope),
                adapter=self.adapters.hold(scope.adapter),
            )
            for index in range(request.params.n)
        ]
        self._requests[request.request_id] = choices
        work: list[futures.Future[Any]] = []
        if len(request.prompt_token_ids) >= _LONG_PROMPT:
            work.append(self._hashing.submit(self.cache.compute_keys, choices[0], _let_others_run))
        if (constraint := request.params.constraint) is not None:
            compiled = self._compiling.submit(self.grammars.compile, constraint)
            self._compiled[request.request_id] = compiled
            work.append(compiled)
        if work:
            self._arriving[request.request_id] = work
        else:
            self._enqueue(choices)

    def _enqueue(self, choices: list[Sequence]) -> None:
        if len(choices) > 1:
            self.cache.compute_keys(choices[0])
            for seq in choices[1:]:
                seq.block_keys = list(choices[0].block_keys)
        for seq in choices:
            if not seq.is_finished:  # aborted on its way
                self.scheduler.add(seq)

    def _enqueue_arrived(self) -> None:
        """Queues the requests that are ready by now; waits a little if nothing else is to do."""
        if not self.scheduler.has_work:
            work = [one for request in self._arriving.values() for one in request]
            futures.wait(
                [one for one in work if not one.done()],
                timeout=_LOAD_WAIT_SECONDS,
                return_when=futures.FIRST_COMPLETED,
            )
        for request_id, work in list(self._arriving.items()):
            if all(one.done() for one in work):
                del self._arriving[request_id]
                choices = self._requests.get(request_id, [])
                compiled = self._compiled.pop(request_id, None)
                if compiled is None or self._give_matchers(choices, compiled):
                    self._enqueue(choices)

    def _give_matchers(self, choices: list[Sequence], compiled: futures.Future[Matcher]) -> bool:
        """Each choice gets a matcher of its own; they end if there is none. Whether there is."""
        if (error := compiled.exception()) is None:
            for seq in choices:
                seq.matcher = compiled.result().copy()
            return True
        self._failed += [self._fail(seq, error) for seq in choices if not seq.is_finished]
        return False

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or only one of its choices. Unknown and finished ones are ignored."""
        for seq in list(self._requests.get(request_id, ())):
            if not seq.is_finished and index in (None, seq.index):
                self._finish(seq, "abort")

    def step(self) -> list[SequenceOutput]:
        """Computes one batch; the new tokens of all choices that got one."""
        if self._arriving:
            self._enqueue_arrived()
            if self._failed:
                failed, self._failed = self._failed, []
                return failed
        chunks = self.scheduler.schedule()
        if not chunks:
            if self.auditor.has_work and not self.has_work:
                self.auditor.step()
            elif self.scheduler.loading:
                self.scheduler.run_loaded(_LOAD_WAIT_SECONDS)
            else:  # all wait, perhaps until bought capacity is there again
                self.scheduler.run_loaded()
                wait = self.scheduler.accounts.seconds_until_credit() or 0.0
                time.sleep(min(wait, _LOAD_WAIT_SECONDS))
            return []
        start = time.perf_counter()
        sampled = [chunk.seq for chunk in chunks if chunk.is_last]
        logits = self.runner.run(chunks)  # [len(sampled), vocab]
        for chunk in chunks:
            self.scheduler.complete(chunk)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens - len(chunks) >= self.cache.block_size:  # a prefill is most of it
            self.cache.compute_time.add((time.perf_counter() - start) / num_tokens)
        self._num_steps += 1
        self._num_computed_tokens += num_tokens
        masks = self._masks(sampled)
        return [
            self._advance(seq, row, masks.get(seq))
            for seq, row in zip(sampled, logits, strict=True)
        ]

    def _masks(self, sampled: list[Sequence]) -> dict[Sequence, Mask]:
        """What the constraints of those that have one allow next."""
        matchers = {seq: seq.matcher for seq in sampled if seq.matcher is not None}
        if not matchers:
            return {}
        rows = self.grammars.masks(list(matchers.values()))
        return dict(zip(matchers, rows, strict=True))

    def _fail(self, seq: Sequence, error: BaseException) -> SequenceOutput:
        """Ends one choice with an error, and no other."""
        output = self._output(seq)
        if not isinstance(error, NoTokenLeft | RequestError):
            logger.error("request %s, choice %d fails", seq.request_id, seq.index, exc_info=error)
        self._finish(seq, "error")
        return msgspec.structs.replace(
            output,
            finish_reason="error",
            error=str(error),
            error_param=error.param if isinstance(error, NoTokenLeft | RequestError) else None,
        )

    def _output(self, seq: Sequence) -> SequenceOutput:
        """What every output says."""
        # The first choice computed the prompt; the others share it.
        num_cached_tokens = self._requests[seq.request_id][0].num_cached_tokens or 0
        cache_report, seq.cache_report = seq.cache_report, None  # told once
        return SequenceOutput(
            request_id=seq.request_id,
            index=seq.index,
            num_cached_tokens=num_cached_tokens,
            cache_report=cache_report,
            prompt_logprobs=seq.prompt_logprobs if seq.num_generated_tokens <= 1 else [],
        )

    def _advance(self, seq: Sequence, logits: Array, allowed: Mask | None) -> SequenceOutput:
        """Appends the next token of one choice; a failure ends this choice and no other."""
        if seq.max_tokens == 0:
            output = self._output(seq)
            self._finish(seq, "length")
            return msgspec.structs.replace(output, finish_reason="length")
        try:
            if seq.matcher is not None:
                seq.matcher.check()  # it says more than an empty mask
            token_id = sampler.sample(logits, seq, self._eos_token_ids, allowed)
            if seq.matcher is not None and token_id not in self._eos_token_ids:
                seq.matcher.advance(token_id)
        except Exception as error:
            return self._fail(seq, error)
        num_top = seq.params.logprobs
        logprob = None if num_top is None else sampler.logprob(logits, token_id, num_top)
        seq.append(token_id, self._eos_token_ids)
        output = msgspec.structs.replace(
            self._output(seq),
            token_id=token_id,
            logprob=logprob,
            finish_reason=seq.finish_reason,
            stop_token_id=seq.stop_token_id,
        )
        if seq.finish_reason is not None:
            self._finish(seq, seq.finish_reason)
        return output

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq, reason)
        adapter = seq.owner.adapter
        if self.adapters.release(adapter):  # it was unloaded while this went on
            self.cache.purge(adapter=adapter)
        if all(choice.is_finished for choice in self._requests[seq.request_id]):
            del self._requests[seq.request_id]

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self.scheduler.has_work or bool(self._arriving)

    @property
    def has_spare_work(self) -> bool:
        """Whether an idle engine should go on stepping: an audit, or blocks on their way down."""
        return self.auditor.has_work or self.cache.hierarchy.num_under_way > 0

    def command(self, command: EngineCommand) -> EngineAnswer:
        """Purges, pins, loads or unloads. Raises ``RequestError`` and ``UnusableAdapter``."""
        if isinstance(command, LoadAdapter):
            return EngineAnswer(adapter=self.adapters.load(command.path))
        if isinstance(command, UnloadAdapter):
            self.adapters.unload(command.digest)
            return self._command_cache(PurgeCache(adapter=command.digest))
        return self._command_cache(command)

    def _command_cache(self, command: CacheCommand) -> EngineAnswer:
        cache = self.cache
        if isinstance(command, PurgeCache):
            self.auditor.cancel()  # it would go on to compute what is being purged
            prefix = None if command.prefix is None else (command.scope, command.prefix)
            purged = cache.purge(tenant=command.tenant, adapter=command.adapter, prefix=prefix)
            return EngineAnswer(purged=purged)
        if isinstance(command, PinPrefix):
            return EngineAnswer(pins=[cache.pin(command.scope, command.token_ids, command.seconds)])
        if isinstance(command, ListPins):
            return EngineAnswer(pins=cache.pins.list(command.tenant))
        if not cache.pins.remove(command.tenant, command.pin_id):
            raise UnknownPin(f"there is no pin {command.pin_id!r}; GET /cache/pins lists them")
        return EngineAnswer()

    def close(self) -> None:
        """Ends the threads; a persistent tier gets what it does not have yet."""
        self._hashing.shutdown(cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._is_persistent:
            self.cache.hierarchy.flush(_FLUSH_SECONDS)
        self.cache.hierarchy.close()

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        pool, cache = self.cache.pool, self.cache.stats
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_loading=len(self.scheduler.loading),
            num_waiting=self.scheduler.accounts.num_waiting + len(self._arriving),
            num_total_blocks=len(pool.blocks),
            num_used_blocks=len(pool.blocks) - pool.num_available,
            num_cached_blocks=pool.num_findable,
            num_window_blocks=self.cache.windows.num_pages if self.cache.windows else 0,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=cache.num_queries,
            prefix_cache_hits=cache.num_hits,
            num_evicted_blocks=pool.num_evicted,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_pinned_blocks=pool.num_pinned,
            num_audited_blocks=self.auditor.num_blocks,
            num_audits_skipped=self.auditor.num_skipped,
            num_audit_mismatches=self.auditor.num_mismatches,
            prefill_seconds_saved=cache.seconds_saved,
            tiers={tier.name: self._count(tier) for tier in self.cache.hierarchy.tiers},
            workload_queries={**cache.queries_of},
            workload_hits={**cache.hits_of},
            tenant_queries=dict(cache.tenant_queries),
            tenant_hits=dict(cache.tenant_hits),
            missed_tokens={**cache.missed_because},
            served_tokens=self.scheduler.accounts.served(),
            bought_tokens=self.scheduler.accounts.spent(),
        )

    def _count(self, tier: Tier) -> TierCounters:
        pool, counters = tier.pool, tier.counters
        return msgspec.structs.replace(
            counters,
            num_blocks=len(pool.blocks),
            num_cached_blocks=pool.num_findable,
            evicted_blocks=pool.num_evicted,
            refused_blocks=pool.num_refused,
            guarantees_broken=pool.num_guarantees_broken,
            stored_bytes=counters.stored_blocks * self._block_bytes,
            loaded_bytes=counters.loaded_blocks * self._block_bytes,
        )


def _let_others_run() -> None:
    time.sleep(0)  # a thread that holds the interpreter would stop the step loop for 5 ms
