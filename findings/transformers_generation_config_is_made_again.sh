#!/usr/bin/env bash
# transformers 5.24.0, GenerationConfig of a model that was made from a configuration.
#
# Guess: from_pretrained has what the checkpoint's generation_config.json says.
#
# Behaviour: a model that is made from a configuration marks its generation config as made so, and save_pretrained writes the
# mark beside fields that a program has set since. from_pretrained then makes the generation config anew of config.json, and
# drops these fields without a word: Whisper's alignment_heads, for example. Without the mark the file is read.
#
# Seen: loaded: nothing.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0
cat > "$folder/check.py" <<'PYTHON'
import json
import tempfile
from pathlib import Path

from transformers import WhisperConfig, WhisperForConditionalGeneration

tiny = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
model = WhisperForConditionalGeneration(WhisperConfig(**tiny))
model.generation_config.alignment_heads = [[0, 1]]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    path = Path(folder) / "generation_config.json"
    saved = json.loads(path.read_text())
    print("in the file:", saved["alignment_heads"], "beside _from_model_config:", saved["_from_model_config"])
    loaded = WhisperForConditionalGeneration.from_pretrained(folder).generation_config
    print("loaded:", getattr(loaded, "alignment_heads", "nothing"))
    path.write_text(json.dumps({name: value for name, value in saved.items() if name != "_from_model_config"}))
    again = WhisperForConditionalGeneration.from_pretrained(folder).generation_config
    print("loaded without the flag:", again.alignment_heads)
    assert not hasattr(loaded, "alignment_heads")
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
