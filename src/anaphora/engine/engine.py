"""The engine: requests of token ids in, tokens out, a step at a time."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from anaphora.cache.hashing import HASH_BYTES, BlockHasher
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.shares import Owner
from anaphora.config import EngineConfig
from anaphora.engine import sampler
from anaphora.engine.memory import plan_max_model_len, plan_num_blocks
from anaphora.engine.runner import ModelRunner
from anaphora.engine.scheduler import Scheduler
from anaphora.engine.sequence import Sequence
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.sources import packed_dir
from anaphora.machine import usable_cores
from anaphora.models.registry import load_model
from anaphora.ops.api import Array, Ops
from anaphora.ops.kv_store import KVLayout
from anaphora.ops.native import NativeOps
from anaphora.types import EngineRequest, EngineStats, FinishReason, ModelInfo, SequenceOutput

logger = logging.getLogger(__name__)

_LOAD_WAIT_SECONDS = 0.005  # then new messages are looked at


class Engine:
    """One model with its cache and its scheduler. Not thread-safe: one loop owns it.

    ``config.model`` is the path of a checkpoint. Raises ``ModelError`` and ``ConfigError``.
    """

    def __init__(self, config: EngineConfig, ops: Ops | None = None) -> None:
        threads = config.threads or usable_cores()
        ops = ops or NativeOps(config.dtype, threads)
        with open_checkpoint(Path(config.model)) as checkpoint:
            model = load_model(checkpoint, ops, packed_dir())
            weights_digest, name = checkpoint.digest, checkpoint.name
            num_parameters = checkpoint.num_parameters
        layout = KVLayout(
            num_layers=model.config.num_hidden_layers,
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            block_size=config.block_size,
            dtype=config.resolved_kv_cache_dtype,
        )
        num_blocks = plan_num_blocks(
            config, weight_bytes=model.weight_bytes, block_bytes=layout.block_bytes
        )
        max_model_len = plan_max_model_len(
            config,
            max_position_embeddings=model.config.max_position_embeddings,
            num_cache_tokens=num_blocks * config.block_size,
        )
        model.set_max_model_len(max_model_len)
        self.info = ModelInfo(
            name=name,
            architecture=model.config.model_type,
            num_parameters=num_parameters,
            num_multiplied_weights=model.num_multiplied_weights,
            num_head_weights=model.num_head_weights,
            vocab_size=model.config.vocab_size,
            max_model_len=max_model_len,
            dtype=config.dtype,
            kv_cache_dtype=layout.dtype,
            block_size=config.block_size,
            num_blocks=num_blocks,
            weight_bytes=model.weight_bytes,
            step_weight_bytes=model.step_weight_bytes,
            kv_cache_bytes=num_blocks * layout.block_bytes,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            threads=threads,
            kernels=ops.name,
        )
        store = ops.create_kv_store(layout, num_blocks)
        self.runner = ModelRunner(model, store)
        self.cache = CacheManager(
            Hierarchy(num_blocks, store),
            config.block_size,
            _create_hasher(config, layout, weights_digest),
            enable_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        self._requests: dict[str, list[Sequence]] = {}
        self._num_steps = 0
        self._num_computed_tokens = 0

    def add(self, request: EngineRequest) -> None:
        """Queues a request's choices. Raises ``RequestError`` and then has changed nothing."""
        request.check(max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        longest = self.info.max_model_len - len(request.prompt_token_ids)
        scope = request.scope
        owner = Owner(scope.tenant, request.workload, scope.adapter)
        choices = [
            Sequence(
                request.request_id,
                index,
                request.prompt_token_ids,
                request.params,
                self.cache.root(scope),
                max_tokens=min(request.params.max_tokens or longest, longest),
                owner=owner,
                num_public_blocks=self.cache.num_public_blocks(request.prompt_token_ids, scope),
            )
            for index in range(request.params.n)
        ]
        self._requests[request.request_id] = choices
        if len(choices) > 1:
            self.cache.compute_keys(choices[0])
            for seq in choices[1:]:
                seq.block_keys = list(choices[0].block_keys)
        for seq in choices:
            self.scheduler.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or only one of its choices. Unknown and finished ones are ignored."""
        for seq in list(self._requests.get(request_id, ())):
            if not seq.is_finished and index in (None, seq.index):
                self._finish(seq, "abort")

    def step(self) -> list[SequenceOutput]:
        """Computes one batch; the new tokens of all choices that got one."""
        chunks = self.scheduler.schedule()
        if not chunks:
            self.scheduler.run_loaded(_LOAD_WAIT_SECONDS)
            return []
        sampled = [chunk.seq for chunk in chunks if chunk.is_last]
        logits = self.runner.run(chunks)  # [len(sampled), vocab]
        for chunk in chunks:
            self.scheduler.complete(chunk)
        self._num_steps += 1
        self._num_computed_tokens += sum(chunk.num_tokens for chunk in chunks)
        return [self._advance(seq, row) for seq, row in zip(sampled, logits, strict=True)]

    def _advance(self, seq: Sequence, logits: Array) -> SequenceOutput:
        """Appends the next token of one choice; a failure ends this choice and no other."""
        # The first choice computed the prompt; the others share it.
        num_cached_tokens = self._requests[seq.request_id][0].num_cached_tokens or 0
        try:
            token_id = sampler.sample(logits, seq, self._eos_token_ids)
        except Exception as error:
            logger.exception("request %s, choice %d fails", seq.request_id, seq.index)
            self._finish(seq, "error")
            return SequenceOutput(
                request_id=seq.request_id,
                index=seq.index,
                num_cached_tokens=num_cached_tokens,
                finish_reason="error",
                error=str(error),
            )
        num_top = seq.params.logprobs
        logprob = None if num_top is None else sampler.logprob(logits, token_id, num_top)
        seq.append(token_id, self._eos_token_ids)
        output = SequenceOutput(
            request_id=seq.request_id,
            index=seq.index,
            num_cached_tokens=num_cached_tokens,
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
        if all(choice.is_finished for choice in self._requests[seq.request_id]):
            del self._requests[seq.request_id]

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self.scheduler.has_work

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        pool = self.cache.pool
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_total_blocks=len(pool.blocks),
            num_used_blocks=len(pool.blocks) - pool.num_free,
            num_cached_blocks=pool.num_findable,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=self.cache.stats.num_queries,
            prefix_cache_hits=self.cache.stats.num_hits,
            num_evicted_blocks=pool.num_evicted,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
        )


def _create_hasher(config: EngineConfig, layout: KVLayout, weights_digest: bytes) -> BlockHasher:
    """Keys under a secret of this process, bound to all that decides the bits in a block."""
    return BlockHasher(
        os.urandom(HASH_BYTES),
        {
            "weights": weights_digest,
            "dtype": config.dtype.encode(),
            "kv_dtype": layout.dtype.encode(),
            "block_size": layout.block_size.to_bytes(4, "little"),
        },
    )
