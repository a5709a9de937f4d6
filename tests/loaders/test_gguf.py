from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.loaders.fields import Fields
from anaphora.loaders.gguf_config import _eos_token_ids
from anaphora.loaders.rope_factors import llama3_factors
from anaphora.models.config import RopeScaling
from anaphora.text.chat import ChatTemplate
from tests.loaders.tiny import CONFIG, Float32Array, random_weights, write_directory, write_gguf

WEIGHTS = random_weights(CONFIG)
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", CONFIG, WEIGHTS)


class TestRealModel:
    def test_configuration(self, smollm2_path: Path) -> None:
        with open_checkpoint(smollm2_path) as checkpoint:
            config = checkpoint.config
            assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
            assert checkpoint.num_parameters == 134_515_008
            assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
            assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
            assert (config.rms_norm_eps, config.rope_theta) == (1e-05, 100_000.0)
            assert config.eos_token_ids == (2,)
            assert config.tie_word_embeddings
            assert config.rope_scaling is None
            assert not checkpoint.has("lm_head.weight")
            assert len(checkpoint.tensor_names) == 2 + 30 * 9

    def test_tensors_have_the_shapes_of_the_configuration(self, smollm2_path: Path) -> None:
        with open_checkpoint(smollm2_path) as checkpoint:
            query = checkpoint.read("model.layers.0.self_attn.q_proj.weight", (576, 576))
            assert query.dtype == np.float32
            assert query.flags.c_contiguous
            assert checkpoint.read("model.layers.29.mlp.down_proj.weight", (576, 1536)).std() < 1
            with pytest.raises(CorruptCheckpoint, match=r"k_proj.*\(192, 576\).*\(5, 5\)"):
                checkpoint.read("model.layers.0.self_attn.k_proj.weight", (5, 5))
            with pytest.raises(CorruptCheckpoint, match=r"model\.layers\.30.*missing"):
                checkpoint.read("model.layers.30.mlp.down_proj.weight")

    def test_digest_is_of_the_content(self, smollm2_path: Path) -> None:
        with open_checkpoint(smollm2_path) as checkpoint:
            inner = hashlib.sha256(smollm2_path.read_bytes()).digest()
            assert checkpoint.digest == hashlib.sha256(inner).digest()


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("F32", 0),
        ("F16", 2e-3),
        ("BF16", 2e-2),
        ("Q8_0", 3e-2),
        ("Q4_0", 0.6),
        ("Q4_1", 0.4),
        ("Q5_0", 0.3),
        ("Q5_1", 0.2),
    ],
)
def test_each_type_reads_as_what_was_written(tmp_path: Path, kind: str, tolerance: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, kind=kind)
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensor_names) == set(WEIGHTS)
        for name, expected in WEIGHTS.items():
            array = checkpoint.read(name, expected.shape)
            np.testing.assert_allclose(array, expected, rtol=0, atol=tolerance, err_msg=name)
    assert array.sum() is not None  # arrays outlive the checkpoint


def test_both_formats_of_one_model_are_one_model(tmp_path: Path, tiny_gguf: Path) -> None:
    directory = write_directory(tmp_path / "hf", CONFIG, WEIGHTS)
    with open_checkpoint(tiny_gguf) as ours, open_checkpoint(directory) as theirs:
        assert ours.config == theirs.config
        assert ours.num_parameters == theirs.num_parameters
        assert set(ours.tensor_names) == set(theirs.tensor_names)
        for name in ours.tensor_names:
            np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)
        text = "Hello <|im_end|> wörld"
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
        assert ours.tokenizer.vocab_size == theirs.tokenizer.vocab_size == 800
        assert ours.chat_template == theirs.chat_template
        message = [{"role": "user", "content": "x"}]
        rendered = ChatTemplate(ours.chat_template, ours.tokenizer).render(message)
        assert rendered == "hi <|eos|>"


def test_biases_and_an_own_head_size(tmp_path: Path) -> None:
    config = CONFIG | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}
    config |= {"tie_word_embeddings": True}
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    directory = write_directory(tmp_path / "hf", config, weights)
    with open_checkpoint(path) as ours, open_checkpoint(directory) as theirs:
        assert ours.config == theirs.config
        assert ours.config.head_dim == 32
        assert ours.config.attention_bias
        assert ours.config.mlp_bias
        assert ours.config.tie_word_embeddings
        for name, expected in weights.items():
            np.testing.assert_array_equal(ours.read(name), expected, err_msg=name)


# The block formats, one value at a time, as ggml documents them. Blocks hold 256 values.


def _scale_and_min(packed: bytes, index: int) -> tuple[int, int]:
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low = packed[index + 4]
    return (
        (low & 15) | (packed[index - 4] >> 6 << 4),
        (low >> 4) | (packed[index] >> 6 << 4),
    )


def _half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def slow_q4_k(block: bytes) -> list[float]:
    d, dmin, scales, quants = _half(block[:2]), _half(block[2:4]), block[4:16], block[16:]
    values = []
    for group in range(8):
        scale, minimum = _scale_and_min(scales, group)
        for i in range(32):
            quant = quants[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            values.append(d * scale * quant - dmin * minimum)
    return values


def slow_q5_k(block: bytes) -> list[float]:
    d, dmin, scales = _half(block[:2]), _half(block[2:4]), block[4:16]
    high, quants = block[16:48], block[48:]
    values = []
    for group in range(8):
        scale, minimum = _scale_and_min(scales, group)
        for i in range(32):
            quant = quants[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            quant += (high[i] >> group & 1) << 4
            values.append(d * scale * quant - dmin * minimum)
    return values


def slow_q6_k(block: bytes) -> list[float]:
    low, high, d = block[:128], block[128:192], _half(block[208:])
    scales = np.frombuffer(block[192:208], np.int8)
    values = []
    for i in range(256):
        half, rest = divmod(i, 128)
        row, column = divmod(rest, 32)
        quant = low[half * 64 + row % 2 * 32 + column] >> (4 * (row // 2)) & 15
        quant |= (high[half * 32 + column] >> (2 * row) & 3) << 4
        values.append(d * float(scales[i // 16]) * (quant - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "num_bytes", "halves", "slow"),
    [
        ("Q4_K", 144, (0, 2), slow_q4_k),
        ("Q5_K", 176, (0, 2), slow_q5_k),
        ("Q6_K", 210, (208,), slow_q6_k),
    ],
)
def test_k_quants_value_by_value(
    tmp_path: Path,
    kind: str,
    num_bytes: int,
    halves: tuple[int, ...],
    slow: Callable[[bytes], list[float]],
) -> None:
    config = CONFIG | {"intermediate_size": 256, "num_hidden_layers": 1}
    generator = np.random.default_rng(3)
    blocks: npt.NDArray[np.uint8] = generator.integers(0, 256, (64, num_bytes), np.uint8)
    for start in halves:
        scale = generator.uniform(0.001, 0.1, (64, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf", config, random_weights(config), raw={DOWN: (blocks, kind)}
    )
    expected = np.array([slow(block.tobytes()) for block in blocks])
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_allclose(checkpoint.read(DOWN, (64, 256)), expected, rtol=1e-5, atol=1e-5)


class TestRope:
    def read(self, path: Path, factors: Float32Array, **changes: Any) -> RopeScaling | None:
        config = CONFIG | {"head_dim": 2 * len(factors)} | changes
        weights = random_weights(config)
        write_gguf(path / "m.gguf", config, weights, rope_freqs=factors)
        with open_checkpoint(path / "m.gguf") as checkpoint:
            assert not checkpoint.has("rope_freqs.weight")
            return checkpoint.config.rope_scaling

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3_parameters_come_back(
        self, tmp_path: Path, head_dim: int, factor: float
    ) -> None:
        scaling = RopeScaling(rope_type="llama3", factor=factor)
        factors = llama3_factors(scaling, 500_000.0, head_dim // 2).astype(np.float32)
        assert self.read(tmp_path, factors) == scaling

    def test_the_factors_are_those_of_the_converter(self) -> None:
        """Its loop, which follows Llama's published code, in float64."""
        factors = []
        for i in range(0, 128, 2):
            wavelength = 2 * np.pi * 500_000.0 ** (i / 128)
            if wavelength < 8192 / 4:
                factors.append(1.0)
            elif wavelength > 8192:
                factors.append(8.0)
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                factors.append(1 / ((1 - smooth) / 8 + smooth))
        scaling = RopeScaling(rope_type="llama3", factor=8.0)
        np.testing.assert_allclose(llama3_factors(scaling, 500_000.0, 64), factors, rtol=1e-12)

    def test_other_parameters_come_back_up_to_their_common_scale(self, tmp_path: Path) -> None:
        scaling = RopeScaling(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=2.0,
            high_freq_factor=16.0,
            original_max_position_embeddings=4096,
        )
        factors = llama3_factors(scaling, 500_000.0, 64).astype(np.float32)
        found = self.read(tmp_path, factors)
        assert found is not None
        assert (found.low_freq_factor, found.high_freq_factor) == (1.0, 8.0)
        assert found.original_max_position_embeddings == 2048
        np.testing.assert_allclose(llama3_factors(found, 500_000.0, 64), factors, rtol=1e-5)

    def test_no_scaling(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, np.ones(16, np.float32)) is None

    @pytest.mark.parametrize("values", [range(1, 17), [np.nan] * 16, [0.0] * 16, [-1.0, 2.0] * 8])
    def test_other_factors_are_refused(self, tmp_path: Path, values: list[float]) -> None:
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
            self.read(tmp_path, np.array(values, np.float32))

    def test_linear(self, tmp_path: Path) -> None:
        extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 4096),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.causal", False),
        ("llama.logit_scale", 0.5),
        ("split.count", 3),
    ],
)
def test_variants_are_refused_by_field_and_value(tmp_path: Path, key: str, value: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra={key: value})
    with pytest.raises(UnsupportedModel, match=rf"{key} is {value!r}"):
        open_checkpoint(path)


def test_end_tokens_of_all_kinds(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 758, "tokenizer.ggml.eos_token_ids": [757, 10]}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.eos_token_ids == (757, 758, 10)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["a", "<end_of_turn>"], (0, 1)),
        (["<|eom_id|>", "<|eot_id|>"], (0, 1)),
        (["a", "<|end|>", "<|return|>", "<|call|>"], (0, 3, 2)),  # <|end|> ends no turn
        (["a", "<|end|>", "<|return|>"], (0,)),
    ],
)
def test_ends_of_turns_are_found_by_name(tokens: list[str], ends: tuple[int, ...]) -> None:
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    assert _eos_token_ids(Fields(fields, Path("x.gguf"))) == ends


def test_named_chat_templates(tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template.tool_use": "tools"}
    path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.chat_template == {"default": "hi {{ eos_token }}", "tool_use": "tools"}


def test_other_architecture_type_and_tensor_are_named(tmp_path: Path, tiny_gguf: Path) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma"))
    with pytest.raises(UnsupportedModel, match=r"general\.architecture is 'gemma'"):
        open_checkpoint(path)
    path.write_bytes(data.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_moon.weight"))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_moon\.weight"):
        open_checkpoint(path)
    path.write_bytes(data.replace(b"blk.1.attn_norm.weight", b"blk.7.attn_norm.weight"))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.7.*2 layers"):
        open_checkpoint(path)
    raw = {DOWN: (np.zeros((64, 3 * 40), np.uint8), "Q8_1")}
    write_gguf(path, CONFIG, WEIGHTS, raw=raw)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_down\.weight has type Q8_1"):
        open_checkpoint(path)


def test_configuration_is_a_frozen_dataclass(tiny_gguf: Path) -> None:
    with (
        open_checkpoint(tiny_gguf) as checkpoint,
        pytest.raises(dataclasses.FrozenInstanceError),
    ):
        checkpoint.config.vocab_size = 5  # type: ignore[misc]
