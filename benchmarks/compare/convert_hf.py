"""A GGUF file as a Hugging Face directory in bfloat16: ``convert_hf.py SOURCE TARGET``.

Runs in an environment with transformers, torch and gguf, such as vLLM's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Loads what the file holds, dequantised, and saves it under the architecture's usual name."""
    source, target = (Path(argument).resolve() for argument in sys.argv[1:])
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    config_file = target / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)  # the weights are plain now
    config["architectures"] = ["LlamaForCausalLM"]
    config_file.write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
