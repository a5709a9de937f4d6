"""Makes families.npz: logits and greedy tokens of Gemma 3 and GPT-OSS, in float32.

Reference: transformers 5.24.0 with torch 2.13.0 (CPU build), both outside the project's own
environment. Four-bit floats are expanded by transformers' own code. Run from the root:

    python -m tests.golden.make_family_goldens PATH_TO_GEMMA3_270M_GGUF
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.golden.make_llama_goldens import PROMPTS, greedy
from tests.golden.sampling import sample_vocabulary
from tests.models.families import (
    GEMMA3_VARIANTS,
    GPT_OSS_VARIANTS,
    gemma3_tensors,
    gpt_oss_tensors,
)

OUTPUT = Path(__file__).with_name("families.npz")


def gemma3_goldens(path: Path) -> dict[str, np.ndarray]:
    folder, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    chosen = sample_vocabulary(model.config.vocab_size)
    arrays = {}
    for i, prompt in enumerate(PROMPTS):
        ids = [2, *tokenizer.encode(prompt, add_special_tokens=False)]
        logits = model(torch.tensor([ids])).logits[0].numpy()
        arrays[f"gemma3-270m/{i}/ids"] = np.array(ids, np.int32)
        arrays[f"gemma3-270m/{i}/logits"] = logits[:, chosen]
        arrays[f"gemma3-270m/{i}/max"] = logits.max(axis=1)
        arrays[f"gemma3-270m/{i}/greedy"] = np.array(greedy(model, ids), np.int32)
    # longer than the window, with the last rows only
    ids = [2, *tokenizer.encode("\n\n".join(PROMPTS) * 12, add_special_tokens=False)][:900]
    logits = model(torch.tensor([ids])).logits[0, -20:].numpy()
    arrays["gemma3-270m/long/ids"] = np.array(ids, np.int32)
    arrays["gemma3-270m/long/logits"] = logits[:, chosen]
    return arrays


def tiny(name: str, model, state: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    tensors = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()}
    missing, unexpected = model.eval().load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    ids = np.random.default_rng(3).integers(3, config["vocab_size"], 40)
    return {
        f"{name}/ids": ids.astype(np.int32),
        f"{name}/logits": model(torch.from_numpy(ids)[None]).logits[0].numpy(),
    }


def expanded(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state with each stack of experts in floats, as the model has them."""
    result = {k: v for k, v in state.items() if not k.endswith(("_blocks", "_scales"))}
    for key in state:
        if key.endswith("_blocks"):
            stack = key.removesuffix("_blocks")
            blocks, scales = (torch.from_numpy(state[f"{stack}_{p}"]) for p in ("blocks", "scales"))
            full = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            result[stack] = full.numpy()
    return result


def main() -> None:
    torch.set_grad_enabled(False)
    arrays = {}
    for name, config in GEMMA3_VARIANTS.items():
        model = Gemma3ForCausalLM(Gemma3TextConfig(**config, attn_implementation="eager"))
        arrays |= tiny(f"gemma3/{name}", model, gemma3_tensors(config), config)
    for name, config in GPT_OSS_VARIANTS.items():
        options = {k: v for k, v in config.items() if k != "quantization_config"}
        model = GptOssForCausalLM(GptOssConfig(**options, attn_implementation="eager"))
        arrays |= tiny(f"gpt_oss/{name}", model, expanded(gpt_oss_tensors(config)), config)
    arrays |= gemma3_goldens(Path(sys.argv[1]))
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT}: {len(arrays)} arrays, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
