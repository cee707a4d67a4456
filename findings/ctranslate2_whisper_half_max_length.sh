#!/usr/bin/env bash
# ctranslate2 4.8.5, models.Whisper.generate.
#
# Guess: `max_length` bounds the tokens of a text, or of prompt and text together.
#
# Behaviour: the text ends after half of `max_length`, whatever the prompt's length: 40 brings 20 tokens after 4 of prompt.
# Who measures texts of a length has to ask for twice as much.
#
# Seen: max_length 40: 20 tokens after a prompt of 4.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ctranslate2==4.8.5 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/check.py" <<'PYTHON'
import json, tempfile
import ctranslate2, numpy as np, torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

END, START, LANGUAGE, TASK, NO_TIMES = "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"
special = [END, START, LANGUAGE, "<|translate|>", TASK, "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", NO_TIMES, "<|0.00|>"]
words = [f"w{number}" for number in range(100)]
tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
tokenizer.add_special_tokens(special)
torch.manual_seed(0)
model = WhisperForConditionalGeneration(WhisperConfig(
    vocab_size=len(words) + len(special), d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
    decoder_attention_heads=1, decoder_start_token_id=101, bos_token_id=100, eos_token_id=100, pad_token_id=100,
    suppress_tokens=[], begin_suppress_tokens=[],
))
model.generation_config.lang_to_id = {LANGUAGE: 102}
model.generation_config.alignment_heads = [[0, 0]]
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as converted:
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END).save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    ctranslate2.converters.TransformersConverter(folder).convert(converted, force=True)
    whisper = ctranslate2.models.Whisper(converted, device="cpu")
features = ctranslate2.StorageView.from_array(np.random.default_rng(0).standard_normal((1, 80, 3000), dtype=np.float32))
for most in (20, 40, 60):
    [found] = whisper.generate(
        features, [[101, 102, 104, 108]], beam_size=1, max_length=most, suppress_tokens=[100], suppress_blank=False
    )
    print(f"max_length {most}: {len(found.sequences_ids[0])} tokens after a prompt of 4")
    assert len(found.sequences_ids[0]) == most // 2
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
