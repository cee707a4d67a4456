"""How texts are split into words before bytes are merged, by llama.cpp's names of the splits (`tokenizer.ggml.pre`).

The regular expressions are those of the original checkpoints' tokenizer.json. A list is applied one after another.
"""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHES}"
)
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _PUNCTUATED]
_DIGITS_APART = [r"\p{N}", _GPT2]

SPLITS: dict[str, list[str]] = {
    "default": [_GPT2],
    "gpt-2": [_GPT2],
    "olmo": [_GPT2],
    "jais": [_GPT2],
    "phi-2": [_GPT2],
    "dbrx": [_LLAMA3],
    "smaug-bpe": [_LLAMA3],
    "chatglm-bpe": [_LLAMA3],
    "glm4": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "llama-bpe": [_LLAMA3],
    "falcon3": [_LLAMA3],
    "pixtral": [_LLAMA3],
    "lfm2": [_LLAMA3],
    "qwen2": [_QWEN2],
    "deepseek-r1-qwen": [_QWEN2],
    "stablelm2": [_QWEN2],
    "megrez": [_QWEN2],
    "hunyuan": [_QWEN2],
    "deepseek-v3": _DEEPSEEK3,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "smollm": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "tekken": [_TEKKEN],
    "gpt-4o": [_GPT4O],
    "llama4": [_GPT4O],
}
"""Regular expressions by the name of the split; what they find, and what lies between, are words."""

IGNORES_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"))
"""Splits of vocabularies where a whole word that is a token is that token, whatever merges would make of it."""

ADDS_BOS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"))
"""Splits whose texts begin with BOS if the file does not say."""

NORMALISED = frozenset(("qwen2", "deepseek-r1-qwen"))
"""Splits of tokenizers that compose characters first (NFC), as the original checkpoints do."""
