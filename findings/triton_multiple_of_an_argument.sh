#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0, compiled for sm_90; no GPU is needed.
#
# Guess: `tl.multiple_of(size, 8)` tells the compiler that a size is divisible, whatever `size` is, so that a load of
# 16-bit elements with the mask `columns < size` takes 16 bytes at once.
#
# Behaviour: of a kernel's own scalar argument, which is not specialized, it has no effect, and no warning is printed.
# Each load and store takes 2 bytes. `size // 8 * 8`, which is the same number, has the effect.
#
# Seen, with both versions: the loads and stores of 16 bytes, and those of 2 bytes, of 8 elements in and out a thread.
#   as it is        0   16
#   multiple_of     0   16
#   size // 8 * 8   2   0
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
cat > "$folder/check.py" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit(do_not_specialize=["size"])
def copy(x_ptr, out_ptr, size, FORM: tl.constexpr):
    if FORM == "multiple_of":
        size = tl.multiple_of(size, 8)
    elif FORM == "size // 8 * 8":
        size = size // 8 * 8
    columns = tl.arange(0, 512)
    tl.store(out_ptr + columns, tl.load(x_ptr + columns, mask=columns < size), mask=columns < size)


def widths(form):
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "FORM": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(copy, signature, {(3,): form}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    code = Path("copy.cubin")
    code.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    lines = subprocess.run([tool, "-c", code], capture_output=True, text=True, check=True).stdout
    return tuple(len(re.findall(rf"(?:LDG|STG)\.E\.{width}", lines)) for width in ("128", "U16"))


found = {form: widths(form) for form in ("as it is", "multiple_of", "size // 8 * 8")}
print("triton", triton.__version__, found)
assert found["as it is"] == (0, 16), found
assert found["multiple_of"] == found["as it is"], found
assert found["size // 8 * 8"] == (2, 0), found
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "triton==$version"
    (cd "$folder" && TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1 "$folder/$version/bin/python" check.py)
done
