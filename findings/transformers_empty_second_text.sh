#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers, fast tokenizers of BERT's kind.
#
# Guess: the two ways to encode one pair of texts, as two arguments and as a list with one pair, give the same ids.
#
# Behaviour: they do, unless the second text is empty. Given as an argument it counts as absent, and the result has the
# form of a single text, one separator and its token type shorter. In a list it is a pair with an empty second part.
# Cross-encoders use the list, so a score of an empty document depends on how the pair was given.
#
# Seen: [CLS] a [SEP] with two arguments; [CLS] a [SEP] [SEP] with a list.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
cat > "$folder/check.py" <<'PYTHON'
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
tokenizer.post_processor = TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
seen = {second: (fast("a", second)["input_ids"], fast([("a", second)])["input_ids"][0]) for second in ("b", "")}
for second, (arguments, pair) in seen.items():
    print(repr(second), fast.convert_ids_to_tokens(arguments), fast.convert_ids_to_tokens(pair))
assert seen["b"] == ([1, 3, 2, 4, 2], [1, 3, 2, 4, 2]), seen
assert seen[""] == ([1, 3, 2], [1, 3, 2, 2]), seen
PYTHON
"$folder/venv/bin/python" "$folder/check.py" 2> /dev/null
