"""The pure parts of ``make compare``; no other engine is needed."""

from __future__ import annotations

import pytest
from results import (
    BEGIN,
    END,
    best_peer,
    ratio_to_best,
    replace_section,
    table,
    to_markdown,
    to_rows,
)
from systems import Peer

from anaphora.bench.report import Line, make_lines
from anaphora.bench.workloads import Hot, Prefill, Sample

SYSTEMS = ["ours", "a", "b"]


def lines() -> list[Line]:
    def hot(miss: float, hit: float) -> list[Sample]:
        return [Sample({"miss": miss, "hit": hit, "miss / hit": miss / hit}, None)]

    samples = {
        "prefill-512": {
            "ours": [Sample({"throughput": v}, 0.0) for v in (900.0, 1000.0, 5000.0)],
            "a": [Sample({"throughput": 500.0}, None)],
            "b": [Sample({"throughput": 800.0}, None)],
        },
        "hot-2048": {"ours": hot(2.0, 0.04), "a": hot(4.0, 0.02)},
    }
    return make_lines([Prefill(512), Hot(2048)], samples)


def test_the_best_peer_is_never_ourselves_and_knows_what_better_means():
    rows = to_rows(lines())
    best = best_peer(rows["prefill-512", "throughput"], "ours")
    assert best is not None
    assert best.system == "b"
    assert ratio_to_best(rows["prefill-512", "throughput"], "ours") == pytest.approx(1.25)
    assert ratio_to_best(rows["hot-2048", "miss"], "ours") == pytest.approx(2)
    assert ratio_to_best(rows["hot-2048", "hit"], "ours") == pytest.approx(0.5)
    assert best_peer({"ours": lines()[0]}, "ours") is None
    assert ratio_to_best({"a": lines()[1]}, "ours") is None


def test_the_table_shows_who_failed():
    text = to_markdown(table(to_rows(lines()), SYSTEMS))
    assert text.splitlines() == [
        "| workload | figure | ours | a | b | to the best peer |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| prefill-512 | throughput | 1,000 tok/s | 500 tok/s | 800 tok/s | 1.25 x |",
        "| hot-2048 | miss | 2.00 s | 4.00 s | failed | 2.00 x |",
        "| hot-2048 | hit | 40 ms | 20 ms | failed | 0.50 x |",
        "| hot-2048 | miss / hit | 50 x | 200 x | failed | 0.25 x |",
    ]


def test_a_variant_adds_options_or_changes_the_environment():
    peer = Peer(
        name="p",
        command=("run", "{port}"),
        environment={"A": "1", "B": "2"},
        variants={"fast": ("--fast",), "unbound": ("env:B=3",)},
    )
    plain, fast, unbound = peer.alternatives()
    assert plain is peer
    assert (fast.name, fast.command) == ("p, fast", ("run", "{port}", "--fast"))
    assert fast.environment == peer.environment
    assert (unbound.command, unbound.environment) == (peer.command, {"A": "1", "B": "3"})


def test_only_the_section_between_the_markers_is_replaced():
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = replace_section(document, "new\n")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replace_section(once, "new") == once
    with pytest.raises(ValueError, match="lacks the markers"):
        replace_section("no markers", "new")
