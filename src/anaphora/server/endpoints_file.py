"""``anaphora.yaml``: endpoints with their classes and terms. Errors point at the line.

Units of provisioned throughput are tokens a second as ``config.Weights`` counts them; how many this
machine has is what ``anaphora bench --capacity`` measured and stored.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from anaphora.capacity import UNIT_TOKENS_PER_SECOND, Capacity
from anaphora.config import BoughtCapacity, Weights
from anaphora.errors import ConfigError
from anaphora.server.endpoints import Endpoint, Price
from anaphora.server.registry import LimitTerms
from anaphora.types import Workload

MAX_FILE_BYTES = 2**20
_SELLABLE = 0.9  # part of the machine that may be bought: the rest keeps others alive


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Limits(_Section):
    requests_per_minute: int | None = Field(None, ge=0)
    input_tokens_per_minute: int | None = Field(None, ge=0)
    output_tokens_per_minute: int | None = Field(None, ge=0)
    concurrent_requests: int | None = Field(None, ge=0)


class _Price(_Section):
    input: float = Field(0.0, ge=0, strict=False)
    cached_input: float = Field(0.0, ge=0, strict=False)
    output: float = Field(0.0, ge=0, strict=False)


class _Endpoint(_Section):
    name: str = Field(pattern=r"^[!-~]{1,128}$")
    adapter: str | None = None
    workload: Workload = Field("interactive", alias="class")
    model_units: int | None = Field(None, ge=1)
    burst: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    tenants: list[str] | None = Field(None, min_length=1)
    limits: _Limits | None = None
    price: _Price | None = None

    @field_validator("name")
    @classmethod
    def _not_all(cls, name: str) -> str:
        if name == "*":
            raise ValueError("must be a name; * stands for all endpoints")
        return name


class _File(_Section):
    model: str | None = None
    max_requests: int = Field(4096, ge=1)
    cached_token_weight: float = Field(0.1, ge=0, le=1, strict=False)
    endpoints: list[_Endpoint] = Field(min_length=1)


# By how deep they are.
_FIELDS = {
    0: ", ".join(_File.model_fields),
    2: ", ".join(field.alias or name for name, field in _Endpoint.model_fields.items()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What ``anaphora.yaml`` says."""

    model: str | None
    endpoints: tuple[Endpoint, ...]
    weights: Weights
    bought_capacity: tuple[BoughtCapacity, ...]
    max_requests: int


def read_config(path: Path, capacity: Capacity | None, model: str = "") -> ServerConfig:
    """The checked file. ``capacity`` is what the machine can do with ``model``, None if nobody has
    measured.

    Raises ``ConfigError`` that names file, line, field and fix.
    """
    file, root = _parse(path)
    return _Checker(path, root, model).check(file, capacity)


def _parse(path: Path) -> tuple[_File, yaml.Node]:
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: this is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}") from None
    if root is None or not isinstance(content, dict):
        raise ConfigError(f"{path}: the file has no 'endpoints'; docs/operations.md shows one")
    try:
        return _File.model_validate(content), root
    except ValidationError as error:
        # a field that is misspelt is missing too: tell of it first
        found = error.errors(include_url=False)
        first = min(found, key=lambda each: each["type"] != "extra_forbidden")
        raise _error(path, root, first["loc"], _reason(first)) from None


def _reason(error: ErrorDetails) -> str:
    """What is wrong, with the fix."""
    fields = _FIELDS.get(len(error["loc"]) - 1 if error["loc"][0] == "endpoints" else 0, "")
    match error["type"]:
        case "extra_forbidden":
            if "limits" in error["loc"][:-1]:
                fields = ", ".join(_Limits.model_fields)
            elif "price" in error["loc"][:-1]:
                fields = ", ".join(_Price.model_fields)
            return f"there is no such field; there are {fields}"
        case "missing":
            return "it is missing; add it"
        case "model_type" | "dict_type" | "model_attributes_type":
            return "it must be a mapping of names to values"
        case "too_short":
            return "it is empty; it needs one element"
        case "string_pattern_mismatch":
            return f"it is {error['input']!r}; it must be 1 to 128 printable characters, no space"
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = error["input"]
    shown = f"it is {value!r}; it " if isinstance(value, str | int | float) else "it "
    return shown + reason.replace("should be a valid", "must be an").replace("should", "must")


def read_model(path: Path) -> str | None:
    """Only the model that it names. Raises ``ConfigError``."""
    return _parse(path)[0].model


def read_prices(path: Path) -> dict[str, Price]:
    """Only the endpoints' prices. Raises ``ConfigError``."""
    endpoints = map(_endpoint, _parse(path)[0].endpoints)
    return {e.name: e.price for e in endpoints if e.price is not None}


class _Checker:
    """What no single field can tell."""

    def __init__(self, path: Path, root: yaml.Node, model: str) -> None:
        self._model = model
        self._path = path
        self._root = root

    def check(self, file: _File, capacity: Capacity | None) -> ServerConfig:
        names: set[str] = set()
        bought = []
        for index, endpoint in enumerate(file.endpoints):
            if endpoint.name in names:
                raise self._error(index, "name", f"{endpoint.name!r} is there twice")
            names.add(endpoint.name)
            if endpoint.workload != "provisioned":
                for field in ("model_units", "burst"):
                    if getattr(endpoint, field):
                        raise self._error(index, field, "only the class provisioned has it")
                continue
            if endpoint.model_units is None:
                raise self._error(index, "class", "provisioned needs model_units; add how many")
            if capacity is None:
                raise self._error(
                    index,
                    "model_units",
                    "what a unit is has not been measured for this model on this machine; run "
                    f"'anaphora bench {self._model} --capacity' first",
                )
            rate = endpoint.model_units * UNIT_TOKENS_PER_SECOND
            bought.append(
                BoughtCapacity(
                    endpoint=endpoint.name, tokens_per_second=rate, may_burst=endpoint.burst
                )
            )
            total = sum(each.tokens_per_second for each in bought)
            if capacity is not None and total > _SELLABLE * capacity.tokens_per_second:
                most = int(_SELLABLE * capacity.tokens_per_second / UNIT_TOKENS_PER_SECOND)
                raise self._error(
                    index,
                    "model_units",
                    f"the endpoints so far buy {total / UNIT_TOKENS_PER_SECOND:.0f} units, and "
                    f"this machine has {most} to sell (nine tenths of what was measured)",
                )
        output = Weights().output if capacity is None else capacity.output_weight
        return ServerConfig(
            model=file.model,
            endpoints=tuple(map(_endpoint, file.endpoints)),
            weights=Weights(cached=file.cached_token_weight, output=output),
            bought_capacity=tuple(bought),
            max_requests=file.max_requests,
        )

    def _error(self, index: int, field: str, reason: str) -> ConfigError:
        return _error(self._path, self._root, ("endpoints", index, field), reason)


def _endpoint(section: _Endpoint) -> Endpoint:
    limits, price = section.limits, section.price
    return Endpoint(
        name=section.name,
        adapter=section.adapter,
        workload=section.workload,
        model_units=section.model_units,
        max_output_tokens=section.max_output_tokens,
        tenants=None if section.tenants is None else frozenset(section.tenants),
        limits=None if limits is None else LimitTerms(**limits.model_dump()),
        price=None if price is None else Price(**price.model_dump()),
    )


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror})") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--config {path} has {len(content)} bytes; this is no configuration")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8; save it as UTF-8") from None


def _error(
    path: Path, root: yaml.Node, location: tuple[int | str, ...], reason: str
) -> ConfigError:
    field = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    line = _find(root, location).start_mark.line + 1
    return ConfigError(f"{path}, line {line}: {field}: {reason[:1].lower() + reason[1:]}")


def _find(node: yaml.Node, location: tuple[Any, ...]) -> yaml.Node:
    """The node of a field, or of the nearest one around it that is there."""
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            continue
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(key, value) for key, value in node.value if key.value == part]
        if not found:
            break
        key, value = found[0]
        node = value if isinstance(value, yaml.MappingNode | yaml.SequenceNode) else key
    return node
