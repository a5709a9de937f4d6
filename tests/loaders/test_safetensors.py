from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from anaphora.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.hf_config import read_config
from anaphora.models.config import RopeScaling
from tests.loaders.tiny import CONFIG, random_weights, write_directory

WEIGHTS = random_weights(CONFIG)
NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("num_shards", [1, 3])
def test_reads_what_was_written(tmp_path: Path, num_shards: int) -> None:
    path = write_directory(tmp_path / "model", CONFIG, WEIGHTS, num_shards=num_shards)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.name == "model"
        assert set(checkpoint.tensor_names) == set(WEIGHTS)
        assert checkpoint.num_parameters == sum(array.size for array in WEIGHTS.values())
        for name, expected in WEIGHTS.items():
            array = checkpoint.read(name, expected.shape)
            assert array.dtype == np.float32
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, expected)


def test_digest_follows_content_not_place(tmp_path: Path) -> None:
    digests = []
    for name, config in (("a", CONFIG), ("b", CONFIG), ("c", CONFIG | {"rope_theta": 1.0})):
        path = write_directory(tmp_path / name, config, WEIGHTS, num_shards=2)
        with open_checkpoint(path) as checkpoint:
            digests.append(checkpoint.digest)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 32


def test_float16(tmp_path: Path) -> None:
    half = {name: array.astype(np.float16) for name, array in WEIGHTS.items()}
    with open_checkpoint(write_directory(tmp_path, CONFIG, half)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(NORM), half[NORM].astype(np.float32))


def test_bfloat16(tmp_path: Path) -> None:
    values = np.array([0.0, -0.0, 1.0, -2.5, 3.3895e38, 1e-40, -1e-30, 65504.0], np.float32)
    bits = (np.resize(values, 64).view(np.uint32) >> 16).astype(np.uint16)
    path = write_directory(tmp_path, CONFIG, WEIGHTS)
    tensors = {name: {"dtype": "F32", "data": a} for name, a in WEIGHTS.items()}
    tensors[NORM] = {"dtype": "BF16", "data": bits}
    write_raw(path / "model.safetensors", tensors)
    with open_checkpoint(path) as checkpoint:
        expected = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(checkpoint.read(NORM, (64,)), expected)
        assert checkpoint.read(NORM)[3] == -2.5
        name = "model.embed_tokens.weight"
        np.testing.assert_array_equal(checkpoint.read(name), WEIGHTS[name])


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, -np.inf):
        damaged = WEIGHTS[NORM].copy()
        damaged[5] = value
        path = write_directory(tmp_path, CONFIG, WEIGHTS | {NORM: damaged})
        with (
            open_checkpoint(path) as checkpoint,
            pytest.raises(CorruptCheckpoint, match=r"model\.norm\.weight holds values"),
        ):
            checkpoint.read(NORM)


def write_raw(path: Path, tensors: dict[str, dict[str, Any]]) -> None:
    """A file with types that NumPy does not have."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + tensor["data"].nbytes
        header[name] = {
            "dtype": tensor["dtype"],
            "shape": list(tensor["data"].shape),
            "data_offsets": [position, end],
        }
        position = end
    head = json.dumps(header).encode()
    body = b"".join(tensor["data"].tobytes() for tensor in tensors.values())
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)


def test_a_tied_head_is_not_read(tmp_path: Path) -> None:
    path = write_directory(tmp_path, CONFIG | {"tie_word_embeddings": True}, WEIGHTS)
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.has("lm_head.weight")
        assert checkpoint.has(NORM)


def test_rotary_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    with open_checkpoint(write_directory(tmp_path, CONFIG, WEIGHTS | extra)) as checkpoint:
        assert set(checkpoint.tensor_names) == set(WEIGHTS)


class TestConfiguration:
    def read(self, path: Path, **changes: Any) -> Any:
        config = {k: v for k, v in (CONFIG | changes).items() if v is not ...}
        with open_checkpoint(write_directory(path, config, WEIGHTS)) as checkpoint:
            return checkpoint.config

    @pytest.mark.parametrize(
        "field",
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "rms_norm_eps",
            "max_position_embeddings",
        ],
    )
    def test_required_fields(self, tmp_path: Path, field: str) -> None:
        with pytest.raises(CorruptCheckpoint, match=rf"config\.json.*{field} is missing"):
            self.read(tmp_path, **{field: ...})
        for wrong in ("12", -1, 0, [5], True):
            with pytest.raises(CorruptCheckpoint, match=field):
                self.read(tmp_path, **{field: wrong})

    def test_defaults(self, tmp_path: Path) -> None:
        absent = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "hidden_act")
        weights = random_weights(CONFIG | {"num_key_value_heads": 4})
        config = {k: v for k, v in CONFIG.items() if k not in absent}
        with open_checkpoint(write_directory(tmp_path, config, weights)) as checkpoint:
            found = checkpoint.config
        assert (found.num_key_value_heads, found.rope_theta) == (4, 10_000.0)
        assert not found.tie_word_embeddings

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model_type", "gemma9"),
            ("architectures", ["MambaForCausalLM"]),
            ("hidden_act", "gelu"),
            ("sliding_window", 4096),
            ("partial_rotary_factor", 0.5),
            ("rope_interleaved", True),
            ("quantization_config", {"bits": 4}),
            ("layer_types", ["sliding_attention"]),
            ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
            ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        ],
    )
    def test_what_would_change_the_result_is_refused(
        self, tmp_path: Path, field: str, value: Any
    ) -> None:
        shown = value[0] if isinstance(value, list) else value
        if isinstance(value, dict) and field.startswith("rope"):
            shown = value.get("rope_type", value.get("type"))
        with pytest.raises(UnsupportedModel, match=rf"{field}.*{shown}"):
            self.read(tmp_path, **{field: value})

    def test_both_spellings_of_rope(self, tmp_path: Path) -> None:
        values = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        values |= {"original_max_position_embeddings": 8192}
        scaling = RopeScaling(rope_type="llama3", **values)
        old = self.read(tmp_path, rope_scaling=values | {"rope_type": "llama3"})
        assert (old.rope_scaling, old.rope_theta) == (scaling, 500_000.0)
        new = values | {"rope_type": "llama3", "rope_theta": 7.0}
        found = self.read(tmp_path, rope_theta=..., rope_parameters=new)
        assert (found.rope_scaling, found.rope_theta) == (scaling, 7.0)
        linear = self.read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
        assert linear.rope_scaling == RopeScaling(rope_type="linear", factor=2.0)
        plain = self.read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
        assert (plain.rope_scaling, plain.rope_theta) == (None, 5.0)
        with pytest.raises(CorruptCheckpoint, match=r"rope_scaling\.factor is missing"):
            self.read(tmp_path, rope_scaling={"type": "linear"})

    def test_end_tokens_come_from_three_files(self, tmp_path: Path) -> None:
        write_directory(tmp_path, CONFIG, WEIGHTS)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [700, 757]}')
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["added_tokens_decoder"] = {
            "759": {"content": "<|eos|>"},
            "758": {"content": "<|eot_id|>"},
            "756": {"content": 5},
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.config.eos_token_ids == (700, 757, 759, 758)

    def test_contradictions(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptCheckpoint, match="4 attention heads cannot share 3"):
            self.read(tmp_path, num_key_value_heads=3)
        with pytest.raises(CorruptCheckpoint, match="head_dim is 15"):
            self.read(tmp_path, head_dim=15)
        with pytest.raises(CorruptCheckpoint, match="hidden size 63"):
            self.read(tmp_path, hidden_size=63)
        with pytest.raises(CorruptCheckpoint, match="9999"):
            self.read(tmp_path, eos_token_id=9999)
        with pytest.raises(UnsupportedModel, match="1 layers"):
            self.read(tmp_path, num_hidden_layers=1)


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_directory(tmp_path, CONFIG, WEIGHTS, num_shards=2)

    def check(self, path: Path, match: str) -> None:
        with pytest.raises(CorruptCheckpoint, match=match):
            open_checkpoint(path)

    def test_missing_shard(self, path: Path) -> None:
        (path / "model-00002-of-00002.safetensors").unlink()
        self.check(path, "model-00002-of-00002.*missing")

    @pytest.mark.parametrize("keep", [0, 5, 100, 20_000])
    def test_truncated_shard(self, path: Path, keep: int) -> None:
        shard = path / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:keep])
        self.check(path, "model-00002-of-00002.*truncated")

    def test_shard_that_shrinks_while_open(self, path: Path) -> None:
        with open_checkpoint(path) as checkpoint:
            for shard in path.glob("*.safetensors"):
                shard.write_bytes(shard.read_bytes()[:5000])
            with pytest.raises(CorruptCheckpoint, match=r"truncated in tensor model\.norm"):
                checkpoint.read(NORM)

    @pytest.mark.parametrize(
        "name", ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", 5, None]
    )
    def test_paths_in_the_index(self, path: Path, name: Any) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"][NORM] = name
        (path / INDEX).write_text(json.dumps(index))
        self.check(path, "only plain names")

    def test_index_and_shards_disagree(self, path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = next(
            iter(index["weight_map"].values())
        )
        (path / INDEX).write_text(json.dumps(index))
        self.check(path, r"lacks the tensor model\.layers\.0\.self_attn\.q_proj\.bias")

    @pytest.mark.parametrize(
        "content", ["", "{}", "[1]", '{"weight_map": {}}', '{"weight_map": 3}']
    )
    def test_damaged_index(self, path: Path, content: str) -> None:
        (path / INDEX).write_text(content)
        self.check(path, r"model\.safetensors\.index\.json")

    @pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
    def test_damaged_config(self, path: Path, content: str) -> None:
        (path / "config.json").write_text(content, encoding="latin-1")
        self.check(path, r"config\.json")

    def test_no_config(self, path: Path) -> None:
        (path / "config.json").unlink()
        self.check(path, r"config\.json is missing")

    def test_types_we_lack(self, tmp_path: Path) -> None:
        path = write_directory(tmp_path / "i8", CONFIG, WEIGHTS)
        save_file(WEIGHTS | {NORM: np.ones(64, np.int8)}, path / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has type I8"):
            open_checkpoint(path)

    def test_unknown_tensor(self, tmp_path: Path) -> None:
        extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}
        path = write_directory(tmp_path / "x", CONFIG, WEIGHTS | extra)
        with pytest.raises(UnsupportedModel, match=r"q_norm\.weight"):
            open_checkpoint(path)


def test_directories_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"no model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="convert"):
        open_checkpoint(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.Q4_0.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"x\.Q4_0\.gguf"):
        open_checkpoint(other)
    with pytest.raises(ModelNotFound, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_library_still_refuses_overlaps() -> None:
    """The offsets that we read ourselves are checked by it alone."""
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    head = json.dumps(header).encode()
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(len(head).to_bytes(8, "little") + head + bytes(12))


# What the published Llama 3.1 8B and 3.3 70B say, every field.
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "num_layers", "num_heads"),
    [(4096, 14336, 32, 32), (8192, 28672, 80, 64)],
    ids=["3.1 8B", "3.3 70B"],
)
def test_published_llama_configurations(
    tmp_path: Path, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int
) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | sizes))
    generation = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read_config(tmp_path, {})
    assert config.head_dim == 128
    assert (config.num_attention_heads, config.num_key_value_heads) == (num_heads, 8)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rope_scaling is not None
    assert config.rope_scaling.rope_type == "llama3"
    assert config.layer_windows == (0,) * num_layers
