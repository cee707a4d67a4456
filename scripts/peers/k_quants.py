"""Makes a GGUF file of llama.cpp's Q4_K_M from one in bfloat16, with llama.cpp's own rounding.

Usage: k_quants.py LIBRARY IN.gguf OUT.gguf

The `gguf` package writes no K formats, and llama.cpp's Python package has no function that converts a file. But its
library exports the one that rounds rows, `ggml_quantize_chunk` (ggml.h).
"""

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np

Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K


def kind_of(name: str, num_layers: int) -> gguf.GGMLQuantizationType:
    """The type of a dense model's matrix in Q4_K_M (`llama_tensor_get_type` in llama.cpp)."""
    if name in ("token_embd.weight", "output.weight"):
        return Q6_K
    if "attn_v." not in name and "ffn_down." not in name:
        return Q4_K
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    has_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return Q6_K if has_more else Q4_K


def main() -> None:
    library, source, target = ctypes.CDLL(sys.argv[1]), gguf.GGUFReader(sys.argv[2]), sys.argv[3]
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in source.fields.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        elif name != "general.architecture" and not name.startswith("GGUF."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    num_layers = source.fields[f"{architecture}.block_count"].contents()

    def rounded(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        rows, size = numbers.shape
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((rows, size // block * num_bytes), np.uint8)
        step = -(-rows // (4 * (os.cpu_count() or 1)))

        def part(first: int) -> None:
            count = min(step, rows - first)
            quantize(kind, numbers[first:].ctypes.data, out[first:].ctypes.data, 0, count, size, None)

        list(pool.map(part, range(0, rows, step)))
        return out

    with ThreadPoolExecutor() as pool:
        for tensor in source.tensors:
            numbers = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if numbers.ndim == 1:
                writer.add_tensor(tensor.name, numbers)
            else:
                kind = kind_of(tensor.name, num_layers)
                writer.add_tensor(tensor.name, rounded(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
