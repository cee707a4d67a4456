"""Architectures of llama.cpp that are not read, and why."""

from collections.abc import Mapping

_IMAGES = "it holds the part of a model that sees images (mmproj): name the file of its text model"
_ENCODER = "it embeds texts and does not write any"
_BOTH = "it has an encoder beside its decoder"
_DIFFUSION = "it writes all tokens at once, by diffusion"
_CODE = "neither Quire nor Transformers has its model"
_METADATA = "its metadata and tensors are not known here"
_READER = "it is the text part of a model that reads images, and is of no use without these"

REASONS: Mapping[str, str] = {
    "clip": _IMAGES,
    **dict.fromkeys(
        (
            "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
            "eurobert", "gemma-embedding", "llama-embed", "t5encoder",
        ),
        _ENCODER,
    ),
    "t5": _BOTH,
    "wavtokenizer-dec": "it makes sound, not text",
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("mpt", "jais", "jais2", "gptj", "dbrx", "bitnet", "chameleon"), _METADATA),
    **dict.fromkeys(("deepseek2-ocr", "hunyuan_vl", "paddleocr"), _READER),
    **dict.fromkeys(
        (
            "deci", "baichuan", "grok", "refact", "qwen", "plamo", "plamo2", "plamo3", "codeshell", "orion", "xverse",
            "openelm", "arctic", "plm", "smallthinker", "grovemoe", "pangu-embedded", "step35", "maincoder",
            "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "cogvlm",
        ),
        _CODE,
    ),
}  # fmt: skip
"""By the name of the architecture."""
