"""vLLM's offline batch, for `benchmarks/reviews.py`: ``vllm_batch.py MODEL [NAME=VALUE ...]``.

Each line of the input is JSON: ``rows``, a file with one list of messages a line; ``choice``, the
answers to choose from; ``result``, where to write what came. Pairs are arguments of ``vllm.LLM``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

READY = "vllm_batch is ready"


def answer(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    """All rows as one call; a row is answer, tokens of its prompt, cached ones, of the answer."""
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    choice = StructuredOutputsParams(choice=job["choice"])
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=choice)
    begin = time.perf_counter()
    outputs = llm.chat(rows, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    found = [
        [o.outputs[0].text, len(o.prompt_token_ids), o.num_cached_tokens or 0,
         len(o.outputs[0].token_ids)]
        for o in outputs
    ]  # fmt: skip
    return {"seconds": seconds, "rows": found}


def main() -> None:
    """Answers jobs until the input ends."""
    model, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    llm = LLM(model, dtype="bfloat16", enable_prefix_caching=True, **options)
    print(READY, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        Path(job["result"]).write_text(json.dumps(answer(llm, job)))
        print(READY, flush=True)


if __name__ == "__main__":
    main()
