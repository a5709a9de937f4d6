"""AI functions over columns: the prompts, the answers' types, and the public face."""

from anaphora.functions.columns import (
    ai_analyze_sentiment,
    ai_classify,
    ai_extract,
    ai_fix_grammar,
    ai_gen,
    ai_mask,
    ai_query,
    ai_similarity,
    ai_summarize,
    ai_translate,
)
from anaphora.functions.usage import Usage

__all__ = [
    "Usage",
    "ai_analyze_sentiment",
    "ai_classify",
    "ai_extract",
    "ai_fix_grammar",
    "ai_gen",
    "ai_mask",
    "ai_query",
    "ai_similarity",
    "ai_summarize",
    "ai_translate",
]
