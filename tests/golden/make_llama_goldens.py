"""Makes llama.npz: logits and greedy tokens of the reference implementation, in float32.

Reference: transformers 5.24.0 with torch 2.13.0 (CPU build), both outside the project's own
environment. Run from the repository's root:

    python -m tests.golden.make_llama_goldens PATH_TO_SMOLLM2_GGUF
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.golden.sampling import sample_vocabulary
from tests.models.tiny import TINY_VARIANTS, tiny_tensors

OUTPUT = Path(__file__).with_name("llama.npz")
NUM_GREEDY = 64
PROMPTS = [
    "The history of the printing press begins",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village at the foot of the mountains, there lived",
    "Water boils at 100 degrees Celsius because",
    "1, 2, 3, 5, 8, 13,",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 14 March. I am writing to",
    "Q: What is the capital of Australia?\nA:",
    "The three laws of thermodynamics are, in short:",
    '{"name": "Ada", "age": 36, "languages": [',
    "Im Herbst fallen die Blätter von den Bäumen, weil",
]


def greedy(model, ids: list[int]) -> list[int]:
    """Greedy tokens without the model's own generation settings."""
    sequence = torch.tensor([ids])
    cache, result = None, []
    for _ in range(NUM_GREEDY):
        out = model(sequence, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        result.append(int(out.logits[0, -1].argmax()))
        sequence = torch.tensor([[result[-1]]])
    return result


def smollm2_goldens(path: Path) -> dict[str, np.ndarray]:
    folder, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    chosen = sample_vocabulary(model.config.vocab_size)
    arrays = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        logits = model(torch.tensor([ids])).logits[0].numpy()
        arrays[f"smollm2/{i}/ids"] = np.array(ids, np.int32)
        arrays[f"smollm2/{i}/logits"] = logits[:, chosen]
        arrays[f"smollm2/{i}/max"] = logits.max(axis=1)
        arrays[f"smollm2/{i}/greedy"] = np.array(greedy(model, ids), np.int32)
    return arrays


def tiny_goldens() -> dict[str, np.ndarray]:
    arrays = {}
    for name, config in TINY_VARIANTS.items():
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        state = {k: torch.from_numpy(v) for k, v in tiny_tensors(config).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing
        model.tie_weights()
        ids = np.random.default_rng(3).integers(3, config["vocab_size"], 40)
        arrays[f"tiny/{name}/ids"] = ids.astype(np.int32)
        arrays[f"tiny/{name}/logits"] = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    return arrays


def main() -> None:
    torch.set_grad_enabled(False)
    arrays = tiny_goldens() | smollm2_goldens(Path(sys.argv[1]))
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT}: {len(arrays)} arrays, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
