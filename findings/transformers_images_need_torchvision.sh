#!/usr/bin/env bash
# transformers 5.24.0 with Pillow and without torchvision, AutoProcessor of Qwen2-VL.
#
# Guess: without torchvision, AutoProcessor reads images through Pillow, as AutoImageProcessor of the same folder does.
#
# Behaviour: it raises, whatever is to be read. A processor is built with all its parts, and the one for videos has no
# form without torchvision. So the image processor and the chat template have to be loaded apart from each other.
#
# Seen: AutoImageProcessor gives Qwen2VLImageProcessorPil and 16 patches of a picture of 56 x 56; AutoProcessor raises
# ImportError, "Qwen2VLVideoProcessor requires the Torchvision library".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 torch==2.13.0 pillow==13.0.0
cat > "$folder/check.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
marks = ["<unk>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
words = Tokenizer(models.WordLevel({mark: index for index, mark in enumerate(marks)}, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
(folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
own = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
(folder / "preprocessor_config.json").write_text(json.dumps(own))

images = AutoImageProcessor.from_pretrained(folder)
patches = images(Image.new("RGB", (56, 56)), return_tensors="np")["pixel_values"]
print(type(images).__name__, patches.shape)
assert len(patches) == 16, patches.shape
try:
    seen = type(AutoProcessor.from_pretrained(folder)).__name__
except ImportError as error:
    seen = str(error).strip()
print(seen)
assert "Qwen2VLVideoProcessor requires the Torchvision library" in seen, seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" "$folder/model" 2> /dev/null
