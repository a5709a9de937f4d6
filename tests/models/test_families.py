"""Gemma 3 and GPT-OSS against transformers in float32, and their integer forms against that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps
from tests.models.families import GEMMA3, GEMMA3_VARIANTS, GPT_OSS, GPT_OSS_VARIANTS, write_family
from tests.models.running import all_logits, divergence, load

GOLDENS = np.load(Path(__file__).parent.parent / "golden" / "families.npz")
VARIANTS = [("gemma3", name, config) for name, config in GEMMA3_VARIANTS.items()]
VARIANTS += [("gpt_oss", name, config) for name, config in GPT_OSS_VARIANTS.items()]


@pytest.mark.parametrize(("family", "name", "config"), VARIANTS)
@pytest.mark.parametrize("backend", [NativeOps, ReferenceOps])
def test_tiny_models_equal_transformers(tmp_path, family, name, config, backend):
    model = load(write_family(tmp_path, config), backend("float32"))
    found = all_logits(model, GOLDENS[f"{family}/{name}/ids"])
    np.testing.assert_allclose(found, GOLDENS[f"{family}/{name}/logits"], atol=5e-4)


@pytest.mark.parametrize("config", [GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def test_tiny_models_in_integers_equal_their_twins(tmp_path, config):
    """A whole model on both backends: what differs is rounding in float, nothing else."""
    path = write_family(tmp_path, config)
    ids = list(range(3, 60))
    native, reference = (
        all_logits(load(path, backend("int8")), ids, "int16")
        for backend in (NativeOps, ReferenceOps)
    )
    np.testing.assert_allclose(native[:5], reference[:5], atol=1e-4)
    # A last-bit difference may round an activation the other way somewhere, which later tokens see:
    # then both are equally far from what is not rounded.
    exact = all_logits(load(path, NativeOps("float32")), ids)
    assert np.abs(native - reference).mean() < np.abs(native - exact).mean() / 3


def test_mxfp4_stays_close_to_its_values(tmp_path):
    """Four-bit weights are exact in both modes: activations alone are rounded."""
    path = write_family(tmp_path, GPT_OSS)
    ids = list(range(3, 200))
    exact = all_logits(load(path, NativeOps("float32")), ids)
    near = all_logits(load(path, NativeOps("int8")), ids, "int16")
    kl = divergence(exact, near)
    print(f"mxfp4 and int8 against float32: mean KL {kl:.5f}")
    assert kl <= 0.02
