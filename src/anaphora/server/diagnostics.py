"""What the cache did for a request, for its client: counts, tiers, reasons and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anaphora.types import CacheReport

CACHE_HEADER = "x-anaphora-cache"


def diagnostics(report: CacheReport | None) -> dict[str, Any]:
    """One prompt's part of ``cache_diagnostics``; all null if its engine told nothing."""
    if report is None:
        report = CacheReport(hits={}, num_missed_tokens=0, miss_reason=None)
    age = report.lost_seconds_ago
    return {
        "cached_tokens": sum(report.hits.values()),
        "hits": report.hits,
        "missed_tokens": report.num_missed_tokens,
        "reason": report.miss_reason,
        "first_differing_token": report.first_differing_token,
        "lost_from": report.lost_from,
        "lost_seconds_ago": None if age is None else round(age, 3),
    }


def cache_headers(reports: Sequence[CacheReport | None]) -> dict[str, str]:
    """The header, such as ``cached=1024; device=1024; missed=17; reason=diverged; at=1030``.

    Of several prompts it has the sums over those that have begun, and their number.
    """
    known = [report for report in reports if report is not None]
    if not known:
        return {}
    tiers: dict[str, int] = {}
    for report in known:
        for tier, num_tokens in report.hits.items():
            tiers[tier] = tiers.get(tier, 0) + num_tokens
    items: dict[str, object] = {"cached": sum(tiers.values())}
    items |= {tier: num_tokens for tier, num_tokens in tiers.items() if num_tokens}
    items["missed"] = sum(report.num_missed_tokens for report in known)
    if len(reports) > 1:
        items["prompts"] = len(known)
    else:
        items["reason"] = known[0].miss_reason
        items["at"] = known[0].first_differing_token
        items["from"] = known[0].lost_from
    given = (f"{name}={value}" for name, value in items.items() if value is not None)
    return {CACHE_HEADER: "; ".join(given)}
