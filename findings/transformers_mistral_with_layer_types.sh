#!/usr/bin/env bash
# transformers 5.24.0.
#
# Guess: a config.json says by `model_type` which class reads it.
#
# Behaviour: `mistral` with the field `layer_types`, null included, is read as `ministral` by AutoConfig, whose layers
# have windows where the field says. MistralConfig reads the same file as Mistral, which windows all layers. So
# AutoModelForCausalLM and MistralForCausalLM are two models of one folder.
#
# Seen: MinistralConfig by AutoConfig, MistralConfig without the field.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from transformers import AutoConfig

read = {}
for more in ({}, {"layer_types": None}, {"layer_types": ["full_attention"] * 2}):
    Path("config.json").write_text(json.dumps({"model_type": "mistral", "num_hidden_layers": 2, **more}))
    read[str(more)] = type(AutoConfig.from_pretrained(".")).__name__
print(read)
assert list(read.values()) == ["MistralConfig", "MinistralConfig", "MinistralConfig"], read
PYTHON
