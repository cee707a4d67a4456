#!/usr/bin/env bash
# tokenizers 0.23.3, sentencepiece 0.2.3.
#
# Guess: Metaspace(prepend_scheme="first") puts one mark before the first word of a text, as SentencePiece's dummy
# prefix does, whatever the text begins with.
#
# Behaviour: no mark is added to a text that begins with a space. SentencePiece adds its prefix there, too: " x" is ▁▁x.
# So the ids of every text that begins with a space differ.
#
# Seen:
#   tokenizers     'x' ▁x    ' x' ▁x
#   SentencePiece  'x' ▁x    ' x' ▁▁x
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

import sentencepiece
from tokenizers import pre_tokenizers

first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["x y xy yx x  y"] * 50), model_writer=model, vocab_size=8, model_type="bpe",
    remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
theirs = {text: "".join(processor.encode(text, out_type=str)) for text in ("x", " x")}
ours = {text: "".join(piece for piece, _ in first.pre_tokenize_str(text)) for text in theirs}
print("tokenizers", ours)
print("SentencePiece", theirs)
assert theirs == {"x": "▁x", " x": "▁▁x"}, theirs
assert ours == {"x": "▁x", " x": "▁x"}, ours
PYTHON
