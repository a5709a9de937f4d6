"""What a loader gives, whatever the format: configuration, tensors, tokenizer.

Models read one tensor at a time, so that no more than one is in memory twice.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from anaphora.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from anaphora.models.config import ModelConfig
from anaphora.ops.quant import MXFP4
from anaphora.text.chat import TemplateSource
from anaphora.text.tokenizer import Tokenizer

Float32Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]

_MAX_EXPONENT = 127 + 64
_LAYER_TENSORS = {
    "llama": r"(input|post_attention)_layernorm\.weight"
    r"|self_attn\.[qkvo]_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.(weight|bias)",
    "gemma3": r"(input|post_attention|(pre|post)_feedforward)_layernorm\.weight"
    r"|self_attn\.([qkvo]_proj|[qk]_norm)\.weight|mlp\.(gate|up|down)_proj\.weight",
    "gpt_oss": r"(input|post_attention)_layernorm\.weight|self_attn\.[qkvo]_proj\.(weight|bias)"
    r"|self_attn\.sinks|mlp\.router\.(weight|bias)|mlp\.experts\.(gate_up|down)_proj(_bias)?",
}


class Checkpoint(abc.ABC):
    """An open checkpoint. Not for use by several threads at once; ``close`` releases its files.

    ``name`` is the file's or directory's name. ``files`` are those that decide the model's results,
    in a fixed order. ``tensor_names`` are as in Hugging Face checkpoints, without the head when it
    is the embedding. Tensors are as the formulas use them, whatever the format: a norm's weight is
    what is multiplied with, an expert's gate and up rows lie one after the other.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        config: ModelConfig,
        shapes: Mapping[str, Shape],
        files: Sequence[Path],
    ) -> None:
        self.path = path
        self.name = name
        self.config = config
        self.files = tuple(files)
        self.tensor_names = tuple(shapes)
        self._shapes = shapes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Release files and memory maps. Arrays that ``read`` returned stay valid."""

    @abc.abstractmethod
    def _read(self, name: str) -> Float32Array:
        """The tensor as a new array in C order; ``name`` exists."""

    @abc.abstractmethod
    def _read_expert(self, name: str, index: int) -> Float32Array | MXFP4:
        """One matrix ``[out, in]`` of the stack ``name``, which exists and has so many."""

    @abc.abstractmethod
    def _build_tokenizer(self) -> Tokenizer: ...

    @abc.abstractmethod
    def _read_chat_template(self) -> TemplateSource | None: ...

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Built at first use: the engine's process needs none."""
        return self._build_tokenizer()

    @functools.cached_property
    def chat_template(self) -> TemplateSource | None:
        """Source of the chat template or templates, for ``ChatTemplate``; None without one."""
        return self._read_chat_template()

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        """Shape of a tensor, ``(out, in)`` for a matrix. Raises as ``read`` does."""
        try:
            return self._shapes[name]
        except KeyError:
            raise CorruptCheckpoint(
                f"{self.path}: tensor {name} is missing; the file is incomplete or from another "
                "model"
            ) from None

    def read(self, name: str, expected_shape: Shape | None = None) -> Float32Array:
        """One tensor in float32, ``[out, in]`` for a matrix, in memory of its own.

        Raises ``CorruptCheckpoint`` when it is missing, has another shape than expected, or holds
        values that are not finite.
        """
        self._check_shape(name, expected_shape)
        array = self._read(name)
        # Neither format has checksums; a NaN here would show only as senseless answers.
        self._check_finite(name, bool(np.isfinite(array).all()))
        return array

    def read_expert(
        self, name: str, index: int, expected_shape: tuple[int, int, int]
    ) -> Float32Array | MXFP4:
        """Matrix ``index`` of the stack ``name`` of ``expected_shape`` [experts, out, in].

        Gate | up rows in one that has both. Raises as ``read`` does.
        """
        self._check_shape(name, expected_shape)
        matrix = self._read_expert(name, index)
        if isinstance(matrix, MXFP4):
            # 255 is NaN; what is far above all real weights would overflow.
            self._check_finite(name, not (matrix.exponents > _MAX_EXPONENT).any())
        else:
            self._check_finite(name, bool(np.isfinite(matrix).all()))
        return matrix

    def _check_shape(self, name: str, expected: Shape | None) -> None:
        shape = self.shape(name)
        if expected is not None and shape != expected:
            raise CorruptCheckpoint(
                f"{self.path}: tensor {name} has shape {shape}, but the configuration asks for "
                f"{expected}; the file or its configuration is from another model"
            )

    def _check_finite(self, name: str, is_finite: bool) -> None:
        if not is_finite:
            raise CorruptCheckpoint(
                f"{self.path}: tensor {name} holds values that are not finite; fetch the file again"
            )

    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        return sum(math.prod(self.shape(name)) for name in self.tensor_names)

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is in ``files``, 32 bytes, the same wherever the files lie.

        Reads all of them at first use, about a second for each GB from the page cache.
        """
        total = hashlib.sha256()
        for path in self.files:
            try:
                with path.open("rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
        return total.digest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory.

    Raises ``ModelNotFound``, ``CorruptCheckpoint`` or ``UnsupportedModel``, each naming the path.
    """
    from anaphora.loaders.gguf import GGUFCheckpoint
    from anaphora.loaders.safetensors import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    raise ModelNotFound(f"{path} does not exist; give a .gguf file or a Hugging Face directory")


def check_tensor_names(path: Path, names: Iterable[str], config: ModelConfig) -> None:
    """Raises ``UnsupportedModel`` for a tensor that the architecture would leave unused."""
    pattern = re.compile(
        r"model\.(embed_tokens|norm)\.weight|lm_head\.weight|model\.layers\.(?P<layer>\d+)\."
        rf"({_LAYER_TENSORS[config.model_type]})"
    )
    for name in names:
        match = pattern.fullmatch(name)
        if match is None or (match["layer"] and int(match["layer"]) >= config.num_hidden_layers):
            raise UnsupportedModel(
                f"{path}: tensor {name} has no place in a {config.model_type} model of "
                f"{config.num_hidden_layers} layers; it is another architecture or a wrong "
                "configuration"
            )
