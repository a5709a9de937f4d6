"""What the workloads send and how they judge answers, without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import pytest

from anaphora.bench.client import Answer
from anaphora.bench.rounds import Rounds
from anaphora.bench.workloads import (
    ALL,
    Chat,
    ClosedLoop,
    Decode,
    Hot,
    OpenLoop,
    Prefill,
    Prompts,
    SharedPrefix,
    joint_decode_rate,
)
from anaphora.errors import MeasurementError


class Recorder:
    """A system that answers at once, and caches as much as it is told to."""

    def __init__(self, *, num_cached: int | None = None, num_missing: int = 0) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.num_running = self.most_running = 0
        self._num_cached = num_cached
        self._num_missing = num_missing

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        self.asked.append((list(prompt), num_tokens))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        self.num_running -= 1
        first = time.perf_counter()
        return Answer(
            start=start,
            events=tuple(first + 0.01 * i for i in range(num_tokens)),
            num_prompt_tokens=len(prompt),
            num_tokens=num_tokens - self._num_missing,
            num_cached_tokens=self._num_cached,
        )


def prompts(*labels: object) -> Prompts:
    return Prompts(1000, *labels)


def starts(recorder: Recorder, length: int) -> set[tuple[int, ...]]:
    return {tuple(prompt[:length]) for prompt, _ in recorder.asked}


def test_prompts_depend_on_their_labels_alone() -> None:
    assert prompts(7, "chat", 0).fresh(50) == prompts(7, "chat", 0).fresh(50)
    assert prompts(7, "chat", 0).fresh(50) != prompts(7, "chat", 1).fresh(50)
    one = prompts(1)
    assert one.fresh(50) != one.fresh(50)
    assert all(100 <= token < 1000 for token in one.fresh(2000))
    with pytest.raises(MeasurementError, match="100 tokens"):
        Prompts(100)


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: workload.name)
def test_every_workload_gives_its_figures(workload) -> None:
    recorder = Recorder()
    sample = asyncio.run(workload.measure(recorder, prompts(workload.name)))
    assert set(sample.values) == {figure.name for figure in workload.figures}
    assert all(value > 0 for value in sample.values.values())
    assert sample.cached_share is None
    asyncio.run(workload.smaller().measure(Recorder(), prompts(workload.name)))


def test_what_is_sent() -> None:
    sent = {}
    for workload in (Hot(64), Decode(4), SharedPrefix(), Chat()):
        sent[workload.name] = Recorder()
        asyncio.run(workload.measure(sent[workload.name], prompts("x")))
    assert sent["hot-64"].asked[0] == sent["hot-64"].asked[1]
    assert sent["decode-4"].most_running == 4
    shared = sent["shared16"]
    assert len(starts(shared, 1024)) == 1
    assert len(starts(shared, 1025)) == 16
    assert {(len(prompt), n) for prompt, n in shared.asked} == {(1088, 32)}
    chat = sent["chat"]
    assert len(chat.asked) == 48
    assert chat.most_running == 8
    assert len(starts(chat, 400)) == 1
    assert len(starts(chat, 460)) == 8  # a turn begins with the one before
    assert sorted({len(prompt) for prompt, _ in chat.asked}) == list(range(460, 761, 60))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8])
def test_known_prefixes_are_sent_first_and_end_with_a_block(share) -> None:
    recorder = Recorder()
    loop = ClosedLoop(share=share, num_requests=40, num_clients=8)
    asyncio.run(loop.measure(recorder, prompts(share)))
    num_known = round(480 * share)
    assert num_known % 16 == 0
    assert recorder.most_running == 8
    known, timed = recorder.asked[:-40], recorder.asked[-40:]
    assert len(known) == (8 if share else 0)
    pool = {tuple(prompt[:num_known]) for prompt, _ in known}
    assert all(len(prompt) == 480 and n == 16 for prompt, n in timed)
    if share:
        assert {tuple(prompt[:num_known]) for prompt, _ in timed} == pool
    assert len({tuple(prompt) for prompt, _ in timed}) == 40


def test_an_open_loop_waits_for_nobody() -> None:
    recorder = Recorder()
    loop = OpenLoop(share=0, num_requests=30, rate=1e6)
    sample = asyncio.run(loop.measure(recorder, prompts("open")))
    assert recorder.most_running > 8
    assert sample.values["p50"] > 0.15  # from the arrival to the last token


def test_answers_are_checked() -> None:
    with pytest.raises(MeasurementError, match="exactly 65 tokens, got 64"):
        asyncio.run(Decode(1).measure(Recorder(num_missing=1), prompts("x")))
    with pytest.raises(MeasurementError, match="32 cached tokens"):
        asyncio.run(Prefill(64).measure(Recorder(num_cached=32), prompts("x")))
    sample = asyncio.run(Chat().measure(Recorder(num_cached=305), prompts("x")))
    assert sample.cached_share == pytest.approx(0.5)


def answer(*events: float, num_tokens: int) -> Answer:
    return Answer(
        start=0.0, events=events, num_prompt_tokens=1, num_tokens=num_tokens, num_cached_tokens=None
    )


def test_decode_counts_only_while_all_streams_decode() -> None:
    early = answer(1.0, 2.0, 3.0, 4.0, num_tokens=4)
    late = answer(2.5, 3.0, 3.5, 4.5, num_tokens=4)
    assert joint_decode_rate([early]) == pytest.approx(1.0)
    # from 2.5 to 4.0: two tokens of each
    assert joint_decode_rate([early, late]) == pytest.approx(4 / 1.5)
    # pieces of three tokens each
    assert joint_decode_rate([answer(1.0, 2.0, 3.0, num_tokens=7)]) == pytest.approx(3.0)
    with pytest.raises(MeasurementError, match="never decoded together"):
        joint_decode_rate([early, answer(5.0, 6.0, num_tokens=2)])


def test_a_round_gives_all_systems_the_same_prompts_and_each_repeat_new_ones() -> None:
    one, two = Recorder(), Recorder()
    notices: list[str] = []
    rounds = Rounds(seed=3, vocab_size=1000, repeats=2, notice=notices.append)
    workload = dataclasses.replace(Decode(2), num_tokens=4)
    samples = asyncio.run(rounds.run([(workload, {"one": one, "two": two})]))
    assert one.asked == two.asked
    assert len({tuple(prompt) for prompt, _ in one.asked}) == 6  # a warm-up and two repeats
    assert [len(repeats) for repeats in samples["decode-2"].values()] == [2, 2]
    assert notices[-1] == "decode-2, two, 2 of 2"
