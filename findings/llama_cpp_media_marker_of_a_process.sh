#!/usr/bin/env bash
# xllamacpp 2026.10.11549 (llama.cpp's server), the places of images in prompts for /completion.
#
# Guess: a text marks the place of an image by `<__media__>`, mtmd's default marker, on any server.
#
# Behaviour: the marker has a random part, which each process draws anew; `/props` tells it as `media_marker`. A client that writes
# `<__media__>`, or keeps the marker over a restart, gets a 400 that says "Failed to tokenize prompt".
#
# Seen: `<__media_`, 32 letters and digits, `__>`; others in the next process.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat > "$folder/check.py" <<'PYTHON'
import json
import sys
import urllib.request

import gguf
import numpy as np
import xllamacpp

writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_context_length(128)
writer.add_embedding_length(32)
writer.add_block_count(1)
writer.add_feed_forward_length(64)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(16)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list([*(chr(33 + place) for place in range(60)), "</s>"])
writer.add_token_types([1] * 60 + [3])
writer.add_token_merges(['! "'])
writer.add_eos_token_id(60)
shapes = {"token_embd": (61, 32), "output_norm": (32,), "output": (61, 32)}
layer = {
    "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32),
    "ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
}
for name, shape in {**shapes, **{f"blk.0.{name}": shape for name, shape in layer.items()}}.items():
    writer.add_tensor(f"{name}.weight", np.full(shape, 0.1, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.verbosity = sys.argv[1], 128, -1
server = xllamacpp.Server(params)
with urllib.request.urlopen(f"{server.listening_address}/props") as answer:
    print(json.load(answer)["media_marker"])
PYTHON
for run in 1 2; do "$folder/venv/bin/python" "$folder/check.py" "$folder/model.gguf" 2> /dev/null | tail -1 > "$folder/$run"; done
cat "$folder/1" "$folder/2"
grep -qE '^<__media_[0-9A-Za-z]{32}__>$' "$folder/1" && ! cmp -s "$folder/1" "$folder/2"
