"""Tells encoders from decoders, by what config.json names."""

from typing import Any

ENCODER_TYPES = frozenset({
    "albert", "bert", "bert-generation", "big_bird", "camembert", "canine", "clip_text_model", "convbert",
    "data2vec-text", "deberta", "deberta-v2", "distilbert", "dpr", "electra", "embedding_gemma2_text", "ernie",
    "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert", "jina_embeddings_v3", "layoutlm",
    "lilt", "llama_bidirec", "longformer", "luke", "markuplm", "megatron-bert", "mobilebert", "modernbert",
    "mpnet", "mra", "new", "nomic_bert", "nvembed", "nystromformer", "openai_privacy_filter", "perceiver",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "siglip_text_model",
    "splinter", "squeezebert", "t5gemma2_encoder", "tapas", "tipsv2_text_model", "ultrabert", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "yoso",
})  # fmt: skip
"""Model types whose classes read a sequence in both directions."""
_DECODER_ENDS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "WithLMHead", "Decoder")
"""The ends of names of such types' classes that generate text."""
_UNLESS_CAUSAL = ("flaubert", "xlm")
"""Types whose field `causal` says which they are, whatever the class."""
_ENCODER_ENDS = ("EncoderModel",)
"""The ends of names of classes that are the encoder of a model with an encoder and a decoder."""


def is_encoder(config: dict[str, Any], architecture: str) -> bool:
    """Returns True if the checkpoint's tokens see each other, and nothing of them is kept from step to step."""
    if architecture.endswith(_ENCODER_ENDS) or config.get("is_causal") is False:
        return True
    if config.get("use_bidirectional_attention") in (True, "all"):
        return not architecture.endswith(_DECODER_ENDS)
    if config.get("model_type") in _UNLESS_CAUSAL:
        return not config.get("causal")
    return config.get("model_type") in ENCODER_TYPES and not architecture.endswith(_DECODER_ENDS)
