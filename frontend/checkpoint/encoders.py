"""Tells encoders from decoders, by what config.json names."""

from typing import Any

ENCODER_TYPES = frozenset({
    "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "esm", "eurobert", "gte", "jina_embeddings_v3", "llama_bidirec", "mobilebert", "modernbert", "mpnet",
    "new", "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roformer",
    "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip
"""Model types whose classes read a sequence in both directions."""
_DECODER_ENDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""The ends of names of such types' classes that generate text."""
_ENCODER_ENDS = ("EncoderModel",)
"""The ends of names of classes that are the encoder of a model with an encoder and a decoder."""


def is_encoder(config: dict[str, Any], architecture: str) -> bool:
    """Returns True if the checkpoint's tokens see each other, and nothing of them is kept from step to step."""
    if architecture.endswith(_ENCODER_ENDS) or config.get("is_causal") is False:
        return True
    if config.get("use_bidirectional_attention") in (True, "all"):
        return not architecture.endswith(_DECODER_ENDS)
    return config.get("model_type") in ENCODER_TYPES and not architecture.endswith(_DECODER_ENDS)
