#!/usr/bin/env bash
# tokenizers 0.23.3, sentencepiece 0.2.3.
#
# Guess: with byte fallback, the piece <0x41> stands for a byte that the vocabulary lacks. A text that spells these
# six characters out is split into characters, as any other text.
#
# Behaviour: tokenizers' Unigram model looks byte pieces up as text, too: the six characters become the one token of
# the byte. SentencePiece, from whose file the vocabulary comes, gives the characters.
#
# Seen: tokenizers ['▁', '<0x41>'], SentencePiece ['▁', '<', '0', 'x', '4', '1', '>']
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

import sentencepiece
from tokenizers import Tokenizer, models

model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["< 0 x 4 1 > a b ab ba"] * 50), model_writer=model, vocab_size=280, model_type="unigram",
    byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
size = processor.get_piece_size()
vocabulary = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(size)]
tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=processor.unk_id(), byte_fallback=True))
ours = tokenizer.encode("▁<0x41>").tokens
theirs = processor.encode("<0x41>", out_type=str)
print("tokenizers", ours, "SentencePiece", theirs)
assert ours == ["▁", "<0x41>"], ours
assert theirs == ["▁", "<", "0", "x", "4", "1", ">"], theirs
PYTHON
