"""Makes lora.npz: logits and greedy tokens of PEFT's LoRA on the tiny Llama, in float32.

Reference: peft 0.21.2, transformers 5.24.0 and torch 2.13.0 (CPU build), outside the project's own
environment. Run from the repository's root:

    python -m tests.golden.make_lora_goldens
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from tests.golden.make_llama_goldens import greedy
from tests.models.adapters import CASES, write_adapter
from tests.models.tiny import TINY_CONFIG, tiny_tensors

OUTPUT = Path(__file__).with_name("lora.npz")


def main() -> None:
    torch.set_grad_enabled(False)
    ids = np.random.default_rng(3).integers(3, TINY_CONFIG["vocab_size"], 40)
    arrays = {"ids": ids.astype(np.int32)}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in CASES.items():
            base = LlamaForCausalLM(LlamaConfig(**TINY_CONFIG)).eval()
            base.load_state_dict({k: torch.from_numpy(v) for k, v in tiny_tensors().items()})
            path = write_adapter(Path(folder) / name, TINY_CONFIG, **arguments)
            model = PeftModel.from_pretrained(base, path).eval()
            loaded = model.state_dict()
            assert sum("lora_B" in key for key in loaded) > 0
            for key, value in loaded.items():  # nothing was left at its initial zero
                assert "lora_B" not in key or value.abs().max() > 0, key
            arrays[f"{name}/logits"] = model(torch.from_numpy(ids)[None]).logits[0].numpy()
            arrays[f"{name}/greedy"] = np.array(greedy(model, ids.tolist()), np.int32)
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT}: {len(arrays)} arrays, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
