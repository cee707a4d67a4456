#!/usr/bin/env bash
# tokenizers 0.23.3.
#
# Guess: an added token decodes to the text that it was added with.
#
# Behaviour: the ByteLevel decoder reads the characters of added tokens as those of its own alphabet, in which a letter
# such as ö is a single byte. The byte is no UTF-8, and the letter becomes U+FFFD. Tokens in ASCII are not affected.
#
# Seen: "Koenigs" comes back, "Königs" as "K\ufffdnigs".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import AddedToken, Tokenizer, decoders, models

tokenizer = Tokenizer(models.BPE())
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_tokens([AddedToken("Koenigs"), AddedToken("K\u00f6nigs")])
found = [tokenizer.decode(tokenizer.encode(text).ids) for text in ("Koenigs", "K\u00f6nigs")]
print(found)
assert found == ["Koenigs", "K\ufffdnigs"], found
PYTHON
