#!/usr/bin/env bash
# transformers 5.24.0.
#
# Guess: a config.json with `rope_scaling` beside `rope_parameters` keeps the base of the latter and adds the scaling.
#
# Behaviour: `rope_scaling` replaces `rope_parameters` whole, and the base falls back to the default of the class. The
# same keyword on a config that Transformers 5 wrote does so, too, while `rope_theta` as a keyword changes nothing.
#
# Seen: rope_theta 10000.0 instead of 500000.0 beside a scaling; 500000.0 instead of 777.0 by keyword.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from transformers import AutoConfig, LlamaConfig

own = {"rope_type": "default", "rope_theta": 500000.0}
both = LlamaConfig(rope_parameters=dict(own), rope_scaling={"rope_type": "linear", "factor": 4.0})
Path("config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": own}))
told = AutoConfig.from_pretrained(".", rope_theta=777.0)
print(both.rope_parameters, told.rope_parameters)
assert both.rope_parameters["rope_theta"] == 10000.0, both.rope_parameters
assert told.rope_parameters["rope_theta"] == 500000.0, told.rope_parameters
PYTHON
