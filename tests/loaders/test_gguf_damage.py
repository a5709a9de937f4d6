from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from anaphora.errors import CorruptCheckpoint, ModelError, UnsupportedModel
from anaphora.loaders.checkpoint import open_checkpoint
from tests.loaders.tiny import CONFIG, random_weights, write_gguf


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, CONFIG, random_weights(CONFIG))


class TestDamage:
    def check(self, path: Path, data: bytes, error: type[ModelError] = CorruptCheckpoint) -> str:
        path.write_bytes(data)
        with pytest.raises(error, match=r"m\.gguf") as caught:
            open_checkpoint(path)
        return str(caught.value)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "m.gguf"

    @pytest.fixture
    def data(self, tiny_gguf: Path) -> bytes:
        return tiny_gguf.read_bytes()

    def test_not_gguf(self, path: Path, data: bytes) -> None:
        assert "empty" in self.check(path, b"")
        assert "b'PK\\x03\\x04'" in self.check(path, b"PK\x03\x04" + data[4:])
        self.check(path, b"GGUF")
        self.check(path, b"GG")

    def test_versions(self, path: Path, data: bytes) -> None:
        big = data[:4] + struct.pack(">I", 3) + data[8:]
        assert "big-endian" in self.check(path, big, UnsupportedModel)
        other = data[:4] + struct.pack("<I", 77) + data[8:]
        assert "77" in self.check(path, other, UnsupportedModel)

    def test_absurd_counts(self, path: Path, data: bytes) -> None:
        for count in (2**64 - 1, 2**63, 2**40, 10**7):
            for offset in (8, 16):
                changed = data[:offset] + struct.pack("<Q", count) + data[offset + 8 :]
                assert str(count) in self.check(path, changed)
        key = b"tokenizer.ggml.tokens"
        start = data.index(key) + len(key) + 4 + 4
        for count in (2**64 - 1, 2**50):
            changed = data[:start] + struct.pack("<Q", count) + data[start + 8 :]
            assert str(count) in self.check(path, changed)

    def test_truncation_anywhere(self, path: Path, data: bytes) -> None:
        header = data.index(b"output_norm.weight")
        ends = [*range(0, header, 997), *range(header, len(data), 20011), len(data) - 33]
        for end in ends:
            self.check(path, data[:end])

    def test_tensor_beyond_the_end(self, path: Path, data: bytes) -> None:
        name = b"token_embd.weight"
        start = data.index(name) + len(name) + 4 + 16 + 4
        changed = data[:start] + struct.pack("<Q", 2**60) + data[start + 8 :]
        assert "token_embd.weight ends at byte" in self.check(path, changed)

    def test_absurd_shapes(self, path: Path, data: bytes) -> None:
        name = b"token_embd.weight"
        start = data.index(name) + len(name)
        for dims in ((0, 800), (2**63, 2**63), (64, 2**45)):
            changed = data[: start + 4] + struct.pack("<QQ", *dims) + data[start + 20 :]
            assert "token_embd.weight" in self.check(path, changed)
        changed = data[:start] + struct.pack("<I", 2**31) + data[start + 4 :]
        assert "dimensions" in self.check(path, changed)

    def test_missing_and_wrong_fields(self, path: Path, data: bytes) -> None:
        changed = data.replace(b"llama.block_count", b"llama.block_cOunt")
        assert "llama.block_count is missing" in self.check(path, changed)
        key = b"llama.attention.head_count"
        start = data.index(key + b"\x04\0\0\0") + len(key) + 4
        changed = data[:start] + struct.pack("<I", 0) + data[start + 4 :]
        assert "head_count is 0" in self.check(path, changed)
        changed = data[:start] + struct.pack("<I", 3) + data[start + 4 :]
        assert "heads" in self.check(path, changed)
        changed = data.replace(
            b"tokenizer.ggml.bos_token_id\x04\0\0\0" + struct.pack("<I", 756),
            b"tokenizer.ggml.bos_token_id\x04\0\0\0" + struct.pack("<I", 9999),
        )
        assert "9999" in self.check(path, changed)

    def test_duplicates(self, path: Path, data: bytes) -> None:
        changed = data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
        assert "occurs twice" in self.check(path, changed)
        changed = data.replace(b"blk.1.ffn_up.weight", b"blk.00.ffn_up.weigh")
        self.check(path, changed, ModelError)

    def test_random_flips_never_give_another_kind_of_error(self, path: Path, data: bytes) -> None:
        generator = np.random.default_rng(11)
        end = data.index(b"output_norm.weight") + 2000
        start = data.index(b"tokenizer.ggml.merges")
        spots = np.concatenate(
            [generator.integers(0, 1500, 150), generator.integers(end - 4000, end, 150)]
        )
        for spot in [*spots, *generator.integers(start, start + 200, 30)]:
            changed = bytearray(data)
            changed[spot] ^= int(generator.integers(1, 256))
            path.write_bytes(changed)
            try:
                with open_checkpoint(path) as checkpoint:
                    _ = checkpoint.tokenizer, checkpoint.chat_template
                    for name in checkpoint.tensor_names:
                        checkpoint.read(name)
            except ModelError as error:
                assert "m.gguf" in str(error)  # noqa: PT017

    def test_scales_that_are_not_finite(self, path: Path) -> None:
        write_gguf(path, CONFIG, random_weights(CONFIG), kind="Q8_0")
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        start = tensors["token_embd.weight"].data_offset
        data = path.read_bytes()
        path.write_bytes(data[:start] + b"\xff\x7f" + data[start + 2 :])
        with open_checkpoint(path) as checkpoint, pytest.raises(CorruptCheckpoint, match="finite"):
            checkpoint.read("model.embed_tokens.weight")

    def test_vocabulary_tables(self, path: Path, data: bytes) -> None:
        def open_tokenizer(changed: bytes) -> None:
            path.write_bytes(changed)
            with open_checkpoint(path) as checkpoint:
                _ = checkpoint.tokenizer

        with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model is 'gptX'"):
            open_tokenizer(data.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0gptX"))
        with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.ggml\.tokens"):
            open_tokenizer(data.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
        with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.ggml\.merges"):
            open_tokenizer(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"))
        with pytest.raises(UnsupportedModel, match="'llama-bqe'"):
            open_tokenizer(data.replace(b"llama-bpe", b"llama-bqe"))
