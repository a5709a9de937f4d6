from typing import Any

import numpy as np
import numpy.typing as npt

PANEL: int
GROUP: int
PARTITION: int

_Float = npt.NDArray[np.float32]
_Int32 = npt.NDArray[np.int32]

class Weight:
    layout: str
    def __init__(
        self,
        data: npt.NDArray[Any],
        scale: _Float | None,
        bias: _Float | None,
        n: int,
        k: int,
        layout: str,
        count: int,
    ) -> None: ...

class KVView:
    def __init__(
        self,
        data: npt.NDArray[Any],
        dtype: str,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
    ) -> None: ...

class BatchView:
    def __init__(
        self,
        kv: KVView,
        positions: _Int32,
        seq_index: _Int32,
        slots: npt.NDArray[np.int64],
        block_tables: _Int32,
    ) -> None: ...

class Norm:
    def __init__(self, weight: _Float, eps: float) -> None: ...

class Rope:
    def __init__(self, cos: _Float, sin: _Float) -> None: ...

class LowRank:
    num_bytes: int
    def __init__(
        self, a: Weight, b: npt.NDArray[Any], scale: _Float | None, spans: _Int32
    ) -> None: ...

class AdaptedRows:
    def __init__(self, adapters: list[list[LowRank | None]], rows: _Int32) -> None: ...

def linear(
    x: _Float,
    weight: Weight,
    out: _Float,
    is_added: bool,
    norm: Norm | None,
    adapters: AdaptedRows | None,
    place: int,
) -> None: ...
def gated_mlp(
    x: _Float,
    gate_up: Weight,
    down: Weight,
    gate: str,
    out: _Float,
    is_added: bool,
    norm: Norm | None,
    adapters: AdaptedRows | None,
    gate_up_place: int,
    down_place: int,
) -> None: ...
def experts(
    x: _Float,
    router: _Float,
    gate_up: Weight,
    down: Weight,
    top_k: int,
    alpha: float,
    limit: float,
    out: _Float,
) -> None: ...
def rms_norm(x: _Float, norm: Norm, out: _Float) -> None: ...
def rope_and_store(
    kv: KVView,
    layer: int,
    qkv: _Float,
    batch: BatchView,
    rope: Rope,
    q_norm: Norm | None,
    k_norm: Norm | None,
) -> None: ...
def attention(
    kv: KVView,
    layer: int,
    qkv: _Float,
    batch: BatchView,
    scale: float,
    out: _Float,
    window: int,
    sinks: _Float | None,
    softcap: float,
) -> None: ...
def packed_size_int8(n: int, k: int) -> int: ...
def packed_size_f32(n: int, k: int) -> int: ...
def packed_size_mxfp4(n: int, k: int) -> int: ...
def pack_int8(w: npt.NDArray[np.int8], out: npt.NDArray[np.int8]) -> None: ...
def pack_f32(w: _Float, out: _Float) -> None: ...
def pack_mxfp4(
    blocks: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
) -> None: ...
def layout_name(is_int8: bool) -> str: ...
def available_kernels() -> list[str]: ...
def kernel_name() -> str: ...
def select_kernels(name: str) -> None: ...
def cpu_features() -> list[str]: ...
def measure_peaks(seconds: float) -> tuple[float, float, float]: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
