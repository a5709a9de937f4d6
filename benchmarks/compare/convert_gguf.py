"""A GGUF file as Q8_0, in our own environment: ``convert_gguf.py SOURCE TARGET``."""

from __future__ import annotations

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

Q8_0 = GGMLQuantizationType.Q8_0
MOSTLY_Q8_0 = 7  # general.file_type


def main() -> None:
    """Copies metadata, requantises matrices, keeps vectors in float32 and four-bit experts."""
    source, target = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    writer.add_file_type(MOSTLY_Q8_0)
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.MXFP4:  # as every engine keeps it
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # Vectors, one or one for each expert; the router, which converters keep as it is.
        if values.ndim == 1 or not tensor.name.endswith(".weight") or "gate_inp" in tensor.name:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quants.quantize(values, Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
