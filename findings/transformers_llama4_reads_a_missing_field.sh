#!/usr/bin/env bash
# transformers 5.24.0, Llama4ForConditionalGeneration.
#
# Guess: the class that AutoModelForImageTextToText takes for Llama 4 runs a forward pass.
#
# Behaviour: it raises AttributeError with any input, images or none: it reads a field of its inner language model's output
# that this one does not have. The inner model runs, so `model.language_model` serves text alone.
#
# Seen: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 pillow==12.0.0
cat > "$folder/check.py" <<'PYTHON'
import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

text = {"hidden_size": 16, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1, "num_local_experts": 2}
text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision)).eval()
ids = torch.tensor([[3, 4, 5]])
with torch.inference_mode():
    logits = model.language_model(input_ids=ids).logits
    print("the language model:", list(logits.shape))
    try:
        model(input_ids=ids)
    except AttributeError as error:
        print("the whole model:", error)
    else:
        raise SystemExit("the whole model runs")
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
