"""``anaphora.yaml``: what it may say, and errors that point at the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.capacity import Capacity, CapacityFile
from anaphora.config import BoughtCapacity, Weights
from anaphora.errors import ConfigError
from anaphora.fake import FakeLLM
from anaphora.server.endpoints import Endpoint, Endpoints, Price
from anaphora.server.endpoints_file import read_config, read_model, read_prices
from anaphora.server.registry import LimitTerms

CAPACITY = Capacity(input_tokens_per_second=2000, output_tokens_per_second=500)
GOOD = """\
model: smollm2
max_requests: 500
cached_token_weight: 0
endpoints:
  - name: support
    tenants: [alice, bob]
    limits: {requests_per_minute: 60, input_tokens_per_minute: 10000}
    price: {input: 0.2, cached_input: 0.02, output: 1}
  - name: gold
    class: provisioned
    model_units: 100
    burst: true
  - name: legal
    adapter: legal-lora
  - name: nightly
    class: batch
"""


def write(tmp_path, text):
    path = tmp_path / "anaphora.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_all_of_it(tmp_path):
    path = write(tmp_path, GOOD)
    config = read_config(path, CAPACITY)
    assert (config.model, config.max_requests) == ("smollm2", 500)
    assert config.weights == Weights(cached=0.0, output=4.0)
    assert config.bought_capacity == (
        BoughtCapacity(endpoint="gold", tokens_per_second=1000.0, may_burst=True),
    )
    support, gold, legal, nightly = config.endpoints
    assert support == Endpoint(
        name="support",
        tenants=frozenset({"alice", "bob"}),
        limits=LimitTerms(requests_per_minute=60, input_tokens_per_minute=10000),
        price=Price(input=0.2, cached_input=0.02, output=1.0),
    )
    assert (gold.workload, gold.model_units) == ("provisioned", 100)
    assert legal.adapter == "legal-lora"
    assert nightly.workload == "batch"
    assert read_model(path) == "smollm2"
    assert set(read_prices(path)) == {"support"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("endpoints:\n  - name: a\n    clas: batch\n", "line 3: endpoints[0].clas: there is no"),
        ("endpoints:\n  - name: a\n    class: fast\n", "line 3: endpoints[0].class: it is 'fast'"),
        ("endpoints:\n  - name: a\n  - name: b\n  - name: a\n", "line 4: endpoints[2].name: 'a'"),
        ("endpoints:\n  - class: batch\n", "line 2: endpoints[0].name: it is missing"),
        ("endpoints:\n  - name: a b\n", "line 2: endpoints[0].name: it is 'a b'; it"),
        ("endpoints:\n  - name: '*'\n", "line 2: endpoints[0].name: it is '*'; it must be a name"),
        ("endpoints: []\n", "line 1: endpoints: it is empty"),
        ("endpoints:\n  - name: a\n    model_units: 4\n", "line 3: endpoints[0].model_units: only"),
        ("endpoints:\n  - name: a\n    burst: true\n", "line 3: endpoints[0].burst: only"),
        ("endpoints:\n  - name: a\n    class: provisioned\n", "line 3: endpoints[0].class: prov"),
        ("endpoints:\n  - name: a\n    limits:\n      requests_per_minute: -1\n",
         "line 4: endpoints[0].limits.requests_per_minute"),
        ("endpoints:\n  - name: a\n    limits: {requests_per_minute: '6'}\n", "line 3"),
        ("endpoints:\n  - name: a\n    tenants: []\n", "line 3: endpoints[0].tenants"),
        ("endpoints:\n  - name: a\n   class: b\n", "line 3: this is not YAML"),
        ("a: [1\n", "this is not YAML"),
        ("", "no 'endpoints'"),
        ("- a\n", "no 'endpoints'"),
        ("a: !!python/object/apply:os.system ['true']\n", "this is not YAML"),
        (b"\xff\xfe", "not UTF-8"),
        ("endpoints:\n" + "  - name: a\n    class: provisioned\n    model_units: 100\n"
         "  - name: b\n    class: provisioned\n    model_units: 90\n",
         "line 7: endpoints[1].model_units: the endpoints so far buy 190 units, and this machine "
         "has 180"),
        ("[" * 100_000, "this is not YAML"),
    ],
)  # fmt: skip
def test_errors_point_at_the_line_and_say_what_would_do(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, CAPACITY)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_units_cannot_be_sold_before_they_are_measured(tmp_path):
    with pytest.raises(ConfigError, match=r"line 11: .*anaphora bench smollm2 --capacity"):
        read_config(write(tmp_path, GOOD), None, "smollm2")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "no.yaml", None)


def test_measured_capacity_is_kept_by_model_precision_and_threads(tmp_path):
    file = CapacityFile(tmp_path / "deep" / "capacity.json")
    assert file.get("smollm2", "int8", 2) is None
    file.put("smollm2", "int8", 2, CAPACITY)
    assert file.get("smollm2", "int8", 2) == CAPACITY
    assert file.get("smollm2", "int8", 4) is None
    assert file.get("smollm2", "float32", 2) is None
    assert CAPACITY.model_units == 200
    for damaged in ("{", "[]", '{"format": 1, "measured": {"smollm2 int8 2 threads": {"x": 1}}}'):
        (tmp_path / "deep" / "capacity.json").write_text(damaged)
        assert file.get("smollm2", "int8", 2) is None


def test_two_endpoints_of_one_name_and_names_of_adapters(tmp_path):
    llm = FakeLLM()
    with pytest.raises(ConfigError, match="give each name once"):
        Endpoints(llm, [Endpoint(name="a"), Endpoint(name="a")])


def test_the_documents_example_is_a_file_that_can_be_served(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    config = read_config(write(tmp_path, text.split("```yaml")[1].split("```")[0]), CAPACITY)
    assert [endpoint.name for endpoint in config.endpoints] == [
        "support", "gold", "legal", "nightly",
    ]  # fmt: skip
