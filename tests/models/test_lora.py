"""LoRA adapters against PEFT's own results, and what cannot be served."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from anaphora.config import EngineConfig
from anaphora.engine.adapters import LoadedAdapters
from anaphora.engine.engine import Engine
from anaphora.errors import UnusableAdapter
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.models.lora import check_adaptable, load_adapter, max_adapter_bytes
from anaphora.models.registry import load_model
from anaphora.ops.lora import AdaptedRows
from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps
from anaphora.types import CacheScope, LoadAdapter
from tests.engine.driving import Driver
from tests.models.adapters import CASES, lora_config, lora_tensors, write_adapter
from tests.models.running import all_logits
from tests.models.tiny import TINY_CONFIG, write_tiny_llama

GOLDENS = np.load(Path(__file__).parent.parent / "golden" / "lora.npz")
IDS = GOLDENS["ids"]


def make_model(path, ops):
    with open_checkpoint(write_tiny_llama(path)) as checkpoint:
        return load_model(checkpoint, ops)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = write_tiny_llama(tmp_path_factory.mktemp("model"))
    config = EngineConfig(
        model=str(path), dtype="float32", kv_cache_memory=2**24, max_loras=len(CASES)
    )
    return Driver(Engine(config))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [NativeOps, ReferenceOps])
def test_logits_equal_peft(tmp_path, case, backend):
    model = make_model(tmp_path / "model", backend("float32"))
    path = write_adapter(tmp_path / "adapter", TINY_CONFIG, **CASES[case])
    adapter = load_adapter(path, model, max_rank=64)
    rows = AdaptedRows(((adapter, 0, len(IDS)),))
    found = all_logits(model, IDS, adapters=rows)
    difference = np.abs(found - GOLDENS[f"{case}/logits"]).max()
    print(f"{case}: largest logit difference {difference:.1e}")
    assert difference <= 2e-4
    base = all_logits(model, IDS)
    assert np.abs(base - found).max() > 0.1  # the adapter matters


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_peft(tmp_path, driver, case):
    path = write_adapter(tmp_path, TINY_CONFIG, **CASES[case])
    info = driver.engine.command(LoadAdapter(path=str(path))).adapter
    expected = GOLDENS[f"{case}/greedy"].tolist()
    scope = CacheScope(adapter=info.digest)
    request = driver.add(IDS.tolist(), scope=scope, max_tokens=len(expected))
    driver.finish()
    assert driver.tokens(request) == expected


def test_int8_stays_close_to_float32(tmp_path):
    """An adapter's rounding adds little to the base's own."""
    path = write_adapter(tmp_path / "adapter", TINY_CONFIG, seed=3, rank=16)
    results = {}
    for dtype, kv_dtype in (("float32", "float32"), ("int8", "int16")):
        model = make_model(tmp_path / "model", NativeOps(dtype))
        adapter = load_adapter(path, model, max_rank=64)
        for name, rows in (("base", None), ("adapted", AdaptedRows(((adapter, 0, len(IDS)),)))):
            results[dtype, name] = all_logits(model, IDS, kv_dtype, adapters=rows)
    errors = {
        name: np.abs(results["int8", name] - results["float32", name]).mean()
        / results["float32", name].std()
        for name in ("base", "adapted")
    }
    print(errors)
    assert errors["adapted"] < 2 * errors["base"]


def test_int8_equals_its_twin(tmp_path):
    path = write_adapter(tmp_path / "adapter", TINY_CONFIG, **CASES["patterns"])
    results = []
    for backend in (NativeOps, ReferenceOps):
        model = make_model(tmp_path / "model", backend("int8"))
        rows = AdaptedRows(((load_adapter(path, model, max_rank=64), 3, 30),))
        results.append(all_logits(model, IDS, "int16", adapters=rows))
    np.testing.assert_allclose(*results, atol=0.2)
    assert np.abs(results[0] - results[1]).mean() < 3e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), NativeOps("int8"))


def test_the_digest_is_of_the_content(tmp_path, model):
    """Not of names, of paths, or of fields that change nothing."""

    def digest(name, **fields):
        path = write_adapter(tmp_path / name, TINY_CONFIG, **({"seed": 1} | fields))
        return load_adapter(path, model, max_rank=64).digest

    same = {digest("a"), digest("b", lora_dropout=0.3, base_model_name_or_path="x")}
    same |= {digest("c", target_modules="all-linear"), digest("d", alpha_pattern={"q_proj": 16})}
    assert len(same) == 1
    others = {digest("e", seed=2), digest("f", lora_alpha=17), digest("g", rank=9)}
    others |= {digest("h", use_rslora=True), digest("i", alpha_pattern={"q_proj": 3})}
    assert len(others | same) == 6


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_precision_files(tmp_path, model, stored):
    path = write_adapter(tmp_path, TINY_CONFIG)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    if stored == "float16":
        save_file({k: v.astype(np.float16) for k, v in tensors.items()}, file)
        exact = {k: v.astype(np.float16).astype(np.float32) for k, v in tensors.items()}
    else:
        upper = {k: (v.view(np.uint32) >> 16).astype(np.uint16) for k, v in tensors.items()}
        write_bfloat16(file, upper)
        exact = {k: (v.astype(np.uint32) << 16).view(np.float32) for k, v in upper.items()}
    found = load_adapter(path, model, max_rank=64).digest
    save_file(exact, file)
    assert load_adapter(path, model, max_rank=64).digest == found


def write_bfloat16(file, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("rank", [1, 16, 33])
def test_what_is_kept_free_is_enough(tmp_path, dtype, rank):
    model = make_model(tmp_path / "model", NativeOps(dtype))
    path = write_adapter(tmp_path / "adapter", TINY_CONFIG, rank=rank)
    adapter = load_adapter(path, model, max_rank=rank)
    weight_bytes = 1 if dtype == "int8" else 4
    most = max_adapter_bytes(model, rank=rank, weight_bytes=weight_bytes)
    assert adapter.num_bytes <= most <= 1.5 * adapter.num_bytes


def test_an_architecture_without_adapters_refuses_them(model):
    class Other:
        config = model.config

    with pytest.raises(UnusableAdapter, match="'llama' takes no LoRA adapters"):
        check_adaptable(Other(), "llama")
    with pytest.raises(UnusableAdapter, match="--max-loras"):
        LoadedAdapters(Other(), EngineConfig(max_loras=1))
    LoadedAdapters(Other(), EngineConfig())


FIELDS = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"peft_type": None}, "peft_type"),
    ({"use_dora": True}, "use_dora is 'True'"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"task_type": "SEQ_CLS"}, "task_type"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"a_new_idea": {"x": 1}}, "a_new_idea .*not known"),
    ({"a_new_idea": 0}, "a_new_idea .*not known"),
    ({"r": 0}, "r is '0'"),
    ({"r": 65, "rank": 65}, "rank 65, above --max-lora-rank, which is 64"),
    ({"r": True}, "r is 'True'"),
    ({"r": "8"}, "r is '8'"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"lora_alpha": 1e41}, "lora_B.weight times its scaling"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"use_rslora": 1}, "use_rslora"),
    ({"rank_pattern": [1]}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"rank_pattern": {"(": 3}}, "rank_pattern .*regular expression"),
    ({"rank_pattern": {"q_proj": 99}}, "q_proj has rank 99, above"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ({"target_modules": None}, "target_modules"),
    ({"target_modules": []}, "target_modules"),
    ({"target_modules": [1]}, "target_modules"),
    ({"target_modules": ["q_proj", "c_attn"]}, "no module 'c_attn'"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens are not supported"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head are not supported"),
    ({"target_modules": ".*(q_proj|lm_head)"}, "lm_head are not supported"),
    ({"target_modules": "nothing"}, "none of this model's modules"),
    ({"target_modules": "(?<!x)q_proj"}, "regular expression"),
    ({"target_modules": r"(q_proj)\1"}, "regular expression"),
    ({"target_modules": "q_proj", "layers_to_transform": [1]}, "layers_to_transform"),
    ({"layers_to_transform": [3]}, "no layer 3"),
    ({"layers_to_transform": "0"}, "layers_to_transform"),
    ({"layers_to_transform": [0], "layers_pattern": 3}, "layers_pattern"),
    ({"exclude_modules": 3}, "exclude_modules"),
    ({"exclude_modules": ".*"}, "none of this model's modules"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_that_cannot_be_served_are_named(tmp_path, model, fields, message):
    path = write_adapter(tmp_path, TINY_CONFIG, rank=fields.pop("rank", 8), **fields)
    with pytest.raises(UnusableAdapter, match=message):
        load_adapter(path, model, max_rank=64)


def test_neutral_and_unknown_fields_are_accepted(tmp_path, model):
    """What LoraConfig writes of all that it knows, and what a later one may add without a value."""
    nothing = ["megatron_config", "layer_replication", "modules_to_save", "exclude_modules"]
    fields = dict.fromkeys([*nothing, "kasa_config", "arrow_config", "invented_tomorrow"])
    fields |= {"loftq_config": {}, "rank_pattern": {}, "use_dora": False, "revision": "main"}
    fields |= {"init_lora_weights": "gaussian", "megatron_core": "megatron.core", "also": False}
    load_adapter(write_adapter(tmp_path, TINY_CONFIG, **fields), model, max_rank=64)


def test_a_hostile_expression_costs_no_time(tmp_path, model):
    path = write_adapter(tmp_path, TINY_CONFIG, target_modules="(([a-z._0-9]+)+)+!")
    with pytest.raises(UnusableAdapter, match="none of this model's modules"):
        load_adapter(path, model, max_rank=64)


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["q_proj", "(", "[", ".*", "all-linear", "\ud800", "layers", "a{1000}{1000}"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = [
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "unknown"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("init_lora_weights", "modules_to_save", "\udfff"),
]


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(st.sampled_from(NAMES), odd, max_size=3))
def test_whatever_a_configuration_says_the_engine_goes_on(tmp_path, model, fields):
    """It is loaded or refused with a message that can be sent; nothing else is raised."""
    path = write_adapter(tmp_path, TINY_CONFIG, rank=2)
    (path / "adapter_config.json").write_text(json.dumps(lora_config(rank=2) | fields))
    try:
        load_adapter(path, model, max_rank=64)
    except UnusableAdapter as error:
        str(error).encode()


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
B = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def without(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, change):
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


def with_nan(array):
    array = array.copy()
    array[-1, -1] = np.nan
    return array


def zeros(*shape, dtype=np.float32):
    return lambda _: np.zeros(shape, dtype)


TENSORS = [
    (without(A), f"tensor {A} is missing"),
    (without(B), f"tensor {B} is missing"),
    (replaced(A, lambda a: a[:, :-1]), rf"tensor {A} has shape \(8, 71\), .* need \(8, 72\)"),
    (replaced(A, lambda a: a[:-1]), f"tensor {A} has shape"),
    (replaced(B, lambda b: b.T), f"tensor {B} has shape"),
    (replaced(B, with_nan), f"tensor {B} holds NaN"),
    (replaced(A, lambda a: a * np.float32(np.inf)), f"tensor {A} holds NaN or infinite"),
    (replaced(A, zeros(8, 72, dtype=np.int8)), f"tensor {A} has type I8"),
    (replaced(A.replace("layers.1", "layers.9"), zeros(8, 72)), "layers.9.* has no place"),
    (replaced("base_model.model.lm_head.lora_A.weight", zeros(8, 72)), "embedding and the head"),
    (
        replaced("base_model.model.model.embed_tokens.lora_embedding_A", zeros(8, 331)),
        "embed_tokens.lora_embedding_A has no place: adapters of the embedding",
    ),
    (
        replaced(A.replace("lora_A.weight", "lora_magnitude_vector"), zeros(104)),
        "lora_magnitude_vector has no place: DoRA",
    ),
    (replaced("base_model.model.lm_head.weight", zeros(331, 72)), "lm_head.weight has no place"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_tensors_that_cannot_be_served_are_named(tmp_path, model, change, message):
    path = write_adapter(tmp_path, TINY_CONFIG)
    tensors = lora_tensors(TINY_CONFIG)
    change(tensors)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, path / "adapter_model.safetensors")
    with pytest.raises(UnusableAdapter, match=message):
        load_adapter(path, model, max_rank=64)


def test_an_adapter_of_another_model_is_named_by_its_tensor(tmp_path, model):
    path = write_adapter(tmp_path, TINY_CONFIG | {"hidden_size": 80})
    with pytest.raises(UnusableAdapter, match=r"layers.0.mlp.down_proj.lora_B.weight has shape"):
        load_adapter(path, model, max_rank=64)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated_files(tmp_path, model, keep):
    file = write_adapter(tmp_path, TINY_CONFIG) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UnusableAdapter, match="damaged or truncated"):
        load_adapter(tmp_path, model, max_rank=64)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_broken_configurations(tmp_path, model, content):
    write_adapter(tmp_path, TINY_CONFIG)
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(UnusableAdapter, match=r"adapter_config.json is not"):
        load_adapter(tmp_path, model, max_rank=64)


def test_what_is_no_adapter_says_nothing_about_itself(tmp_path, model):
    """One message for a directory, a file, a pipe, what nobody may read, and nothing."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "adapter_config.json").write_text("{}")
    secret.chmod(0)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "adapter_config.json")
    folder = tmp_path / "folder"
    (folder / "adapter_config.json").mkdir(parents=True)
    (tmp_path / "file").write_text("{}")
    paths = [tmp_path, tmp_path / "absent", tmp_path / "file", pipe, folder]
    paths += [Path("/etc/passwd"), Path("/etc/../etc"), Path("a\0b")]
    if os.geteuid() != 0:
        paths.append(secret)
    messages = set()
    for path in paths:
        with pytest.raises(UnusableAdapter) as caught:
            load_adapter(path, model, max_rank=64)
        messages.add(str(caught.value).replace(str(path), "PATH"))
    assert messages == {
        "PATH has no readable adapter_config.json; give a directory as PEFT's save_pretrained "
        "writes it"
    }
    secret.chmod(0o700)


def test_missing_and_huge_weights(tmp_path, model):
    file = write_adapter(tmp_path, TINY_CONFIG) / "adapter_model.safetensors"
    file.unlink()
    with pytest.raises(UnusableAdapter, match=r"no readable adapter_model\.safetensors"):
        load_adapter(tmp_path, model, max_rank=64)
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(UnusableAdapter, match="more than such an adapter needs"):
        load_adapter(tmp_path, model, max_rank=64)
