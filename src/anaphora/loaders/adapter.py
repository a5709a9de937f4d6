"""PEFT directories: adapter_config.json beside adapter_model.safetensors.

Only LoRA, and only what we compute as PEFT does (https://github.com/huggingface/peft, 0.21): a
field that would change the result in another way is refused by name, and so is one that we do not
know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
from pydantic_core import SchemaError, SchemaValidator, core_schema

from anaphora.errors import UnusableAdapter

Array = npt.NDArray[np.float32]
Modules = Mapping[str, tuple[int, int]]  # module → its outputs and inputs

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 2**20
_MAX_HEADER_BYTES = 2**24
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_UNADAPTED = ("model.embed_tokens", "lm_head")  # modules that PEFT can adapt and we cannot
_ALL_LINEAR = "all-linear"  # PEFT's shorthand for all but the head

# Fields that decide the result.
_USED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
# Fields that would change it in a way that we do not compute → the values that do not.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "use_dora": (False,),
    "lora_bias": (False,),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": (),
    "use_qalora": (False,),
    "megatron_config": (),
    # Others change the base weights at the start of training, so that the adapter fits only those.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Fields of training, of loading, or names.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    }
)
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")


class Pair(NamedTuple):
    """The two matrices of one module."""

    a: Array  # [rank, in]
    b: Array  # [out, rank], the scaling within


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter as it was read, checked against its model."""

    digest: str  # SHA-256 of all that decides the result, in hexadecimal
    pairs: dict[str, Pair]  # by module


@dataclasses.dataclass(frozen=True)
class _Target:
    rank: int
    scaling: float


def read_adapter(path: Path, modules: Modules, *, max_rank: int) -> AdapterFile:
    """The adapter in ``path`` for a model with these modules.

    Raises ``UnusableAdapter`` for whatever we could not compute as PEFT would.
    """
    content = _read_file(path, CONFIG_FILE, _MAX_CONFIG_BYTES)
    try:
        fields = json.loads(content)
        json.dumps(fields, ensure_ascii=False).encode()  # half characters could not be reported
    except (ValueError, RecursionError):
        raise UnusableAdapter(f"{path / CONFIG_FILE} is not valid JSON") from None
    if not isinstance(fields, dict):
        raise UnusableAdapter(f"{path / CONFIG_FILE} is not a JSON object")
    config = _Config(fields, path / CONFIG_FILE)
    config.refuse_unsupported()
    targets = config.targets(modules)
    for name, target in targets.items():
        if target.rank > max_rank:
            raise UnusableAdapter(
                f"{config.path}: {name} has rank {target.rank}, above --max-lora-rank, which is "
                f"{max_rank}; raise it"
            )
    return _read_pairs(path, targets, modules)


def _read_pairs(path: Path, targets: Mapping[str, _Target], modules: Modules) -> AdapterFile:
    file = path / WEIGHTS_FILE
    num_weights = sum(t.rank * sum(modules[name]) for name, t in targets.items())
    content = _read_file(path, WEIGHTS_FILE, 4 * num_weights + _MAX_HEADER_BYTES)
    try:
        tensors = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except (safetensors.SafetensorError, ValueError) as error:
        raise UnusableAdapter(f"{file} is damaged or truncated ({error}); copy it again") from None
    digest = hashlib.sha256(b"anaphora lora 1")
    pairs: dict[str, Pair] = {}
    for name, target in sorted(targets.items()):
        out_features, in_features = modules[name]
        shapes = {"lora_A": (target.rank, in_features), "lora_B": (out_features, target.rank)}
        a, b = (
            _take(file, tensors, f"{_PREFIX}{name}.{matrix}.weight", shape)
            for matrix, shape in shapes.items()
        )
        # B alone is scaled, as A x is what the kernels round.
        with np.errstate(over="ignore"):
            b = b * np.float32(target.scaling)
        if not np.isfinite(b).all():
            raise UnusableAdapter(
                f"{file}: {_PREFIX}{name}.lora_B.weight times its scaling, {target.scaling:g}, "
                "overflows float32"
            )
        for part in (name.encode(), struct.pack("<3q", target.rank, *modules[name])):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(a.data)
        digest.update(b.data)
        pairs[name] = Pair(a, b)
    for name in sorted(tensors):  # what nobody has taken
        raise UnusableAdapter(f"{file}: tensor {name} has no place: {_reason(name)}")
    return AdapterFile(digest=digest.hexdigest(), pairs=pairs)


def _take(file: Path, tensors: dict[str, Any], name: str, shape: tuple[int, int]) -> Array:
    try:
        tensor = tensors.pop(name)
    except KeyError:
        raise UnusableAdapter(
            f"{file}: tensor {name} is missing, which target_modules announce"
        ) from None
    if tuple(tensor["shape"]) != shape:
        raise UnusableAdapter(
            f"{file}: tensor {name} has shape {tuple(tensor['shape'])}, but this model and the "
            f"configured rank need {shape}; the adapter was made for another model or rank"
        )
    if tensor["dtype"] not in _DTYPES:
        raise UnusableAdapter(
            f"{file}: tensor {name} has type {tensor['dtype']}; supported are {', '.join(_DTYPES)}"
        )
    raw = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
    if tensor["dtype"] == "BF16":  # the upper half of a float32
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    array = np.ascontiguousarray(raw.reshape(shape), np.float32)
    if not np.isfinite(array).all():
        raise UnusableAdapter(f"{file}: tensor {name} holds NaN or infinite values")
    return array


def _reason(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not supported"
    if "lora_embedding" in name or any(f"{module}." in name for module in _UNADAPTED):
        return "adapters of the embedding and the head are not supported"
    return "target_modules do not name it, or this model does not have it"


@dataclasses.dataclass(frozen=True)
class _Config:
    """The fields of adapter_config.json."""

    fields: Mapping[str, Any]
    path: Path

    def refuse_unsupported(self) -> None:
        """Raises for a field whose value asks for what we do not compute."""
        if self.fields.get("peft_type") != "LORA":
            raise self._wrong("peft_type", "only 'LORA' is supported")
        for name, value in self.fields.items():
            if name in _UNSUPPORTED:
                allowed = (None, *_UNSUPPORTED[name])
                if not any(_same(value, one) for one in allowed):
                    supported = " or ".join(repr(one) for one in allowed if one is not None)
                    raise self._wrong(name, f"supported is {supported or 'null'} only")
            elif name not in _USED | _WITHOUT_EFFECT and not any(
                _same(value, one) for one in _NEUTRAL
            ):
                raise self._wrong(name, "the field is not known here and may change the result")

    def targets(self, modules: Modules) -> dict[str, _Target]:
        """Rank and scaling of each module that is adapted."""
        rank, alpha = self._rank("r", self.fields.get("r")), self._number("lora_alpha")
        rank_pattern = self._pattern("rank_pattern")
        alpha_pattern = self._pattern("alpha_pattern")
        is_stabilised = self.fields.get("use_rslora") or False
        if not isinstance(is_stabilised, bool):
            raise self._wrong("use_rslora", "it must be true or false")
        targets: dict[str, _Target] = {}
        for name in self._target_names(modules):
            key = self._find_pattern("rank_pattern", rank_pattern, name)
            own_rank = rank if key is None else self._rank("rank_pattern", rank_pattern[key])
            key = self._find_pattern("alpha_pattern", alpha_pattern, name)
            own_alpha = (
                alpha if key is None else self._as_number("alpha_pattern", alpha_pattern[key])
            )
            divisor = math.sqrt(own_rank) if is_stabilised else own_rank
            targets[name] = _Target(own_rank, own_alpha / divisor)
        return targets

    def _target_names(self, modules: Modules) -> list[str]:
        """Modules that ``target_modules`` name, as PEFT's check_target_module_exists decides."""
        wanted = self.fields.get("target_modules")
        everything = [*modules, *_UNADAPTED]
        layers = self.fields.get("layers_to_transform")
        if isinstance(wanted, str):
            if layers is not None or self.fields.get("layers_pattern"):
                raise self._wrong("layers_to_transform", "target_modules must then be a list")
            if wanted.lower() == _ALL_LINEAR:
                named = list(modules)
            else:
                named = self._matching("target_modules", wanted, everything)
        elif isinstance(wanted, list) and wanted and all(isinstance(w, str) for w in wanted):
            for entry in wanted:
                if not any(_ends_with(name, [entry]) for name in everything):
                    raise self._wrong("target_modules", f"this model has no module {entry!r}")
            named = [name for name in everything if _ends_with(name, wanted)]
            if layers is not None and layers != []:
                # A module that is named in full is adapted whatever its layer.
                chosen = self._in_layers(layers, named)
                named = [name for name in named if name in wanted or name in chosen]
        else:
            raise self._wrong(
                "target_modules", "it must be a regular expression or a list of names"
            )
        excluded = self._excluded(named)
        named = [name for name in named if name not in excluded]
        for name in named:
            if name in _UNADAPTED:
                raise self._wrong(
                    "target_modules", f"adapters of {name.rpartition('.')[2]} are not supported"
                )
        if not named:
            raise self._wrong("target_modules", "none of this model's modules is named")
        return named

    def _excluded(self, names: list[str]) -> set[str]:
        excluded = self.fields.get("exclude_modules") or []
        if isinstance(excluded, str):
            return set(self._matching("exclude_modules", excluded, names))
        if not isinstance(excluded, list) or not all(isinstance(e, str) for e in excluded):
            raise self._wrong("exclude_modules", "it must be a regular expression or a list")
        return {name for name in names if _ends_with(name, excluded)}

    def _in_layers(self, layers: Any, names: list[str]) -> set[str]:
        """Those of ``names`` that stand in the layers chosen."""
        numbers = [layers] if isinstance(layers, int) else layers
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise self._wrong("layers_to_transform", "it must be a number or a list of numbers")
        patterns = self.fields.get("layers_pattern") or ["[^.]*"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise self._wrong("layers_pattern", "it must be a name or a list of names")
        beginnings = {name: re.match(r"(.*?\.\d+)\.", name) for name in names}
        chosen = set()
        for pattern in patterns:
            for name, match in beginnings.items():
                if match is None:
                    continue
                start, _, number = match[1].rpartition(".")
                if int(number) in numbers and self._matching(
                    "layers_pattern", rf"(.*\.)?({pattern})", [start]
                ):
                    chosen.add(name)
        present = {int(match[1].rpartition(".")[2]) for match in beginnings.values() if match}
        if missing := sorted(set(numbers) - present):
            raise self._wrong("layers_to_transform", f"this model has no layer {missing[0]}")
        return chosen

    def _find_pattern(self, field: str, patterns: Mapping[str, Any], name: str) -> str | None:
        """The first pattern for a module, as PEFT's get_pattern_key decides."""
        for pattern in patterns:
            if self._matching(field, rf"(.*\.)?({pattern})", [name]):
                return pattern
        return None

    def _matching(self, field: str, pattern: str, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that match in full.

        The expression comes from whoever made the adapter, so it runs in an engine whose time is
        linear. It knows neither references to groups nor what stands around a match.
        """
        try:
            validator = _compile(pattern)
        except SchemaError:
            raise self._wrong(field, "it is no regular expression that is supported") from None
        return [name for name in names if validator.isinstance_python(name)]

    def _pattern(self, field: str) -> Mapping[str, Any]:
        value = self.fields.get(field) or {}
        if not isinstance(value, dict):
            raise self._wrong(field, "it must be an object")
        return value

    def _rank(self, field: str, value: Any) -> int:
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(field, "a rank must be a positive whole number")
        return value

    def _number(self, field: str) -> float:
        return self._as_number(field, self.fields.get(field))

    def _as_number(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(field, "it must be a number")
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
        raise self._wrong(field, "it must be a finite number")

    def _wrong(self, field: str, reason: str) -> UnusableAdapter:
        value = self.fields.get(field)
        if field not in self.fields:
            return UnusableAdapter(f"{self.path}: {field} is missing; {reason}")
        return UnusableAdapter(f"{self.path}: {field} is {str(value)[:100]!r}; {reason}")


@functools.lru_cache(4096)
def _compile(pattern: str) -> SchemaValidator:
    return SchemaValidator(
        core_schema.str_schema(pattern=rf"\A(?:{pattern})\z", regex_engine="rust-regex")
    )


def _ends_with(name: str, endings: Iterable[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _same(value: Any, other: Any) -> bool:
    # 0 == False in Python but not in JSON
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _read_file(path: Path, name: str, max_bytes: int) -> bytes:
    """A regular file's content.

    Whatever the reason that there is none, the error is the same: who may name a path need not
    learn what else lies on this machine.
    """
    missing = UnusableAdapter(
        f"{path} has no readable {name}; give a directory as PEFT's save_pretrained writes it"
    )
    try:
        # not blocking: what lies there under that name may be a pipe
        with open(
            path / name, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)
        ) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise missing
            if status.st_size > max_bytes:
                raise UnusableAdapter(
                    f"{path / name} has {status.st_size} bytes, more than {max_bytes}, which is "
                    "more than such an adapter needs"
                )
            return file.read(max_bytes)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        raise missing from None
