"""Tiny random checkpoints of models with an encoder and a decoder, and what Transformers computes with them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

VOCAB_SIZE = 211
START = 2
_BART = {
    "d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 72, "decoder_ffn_dim": 60, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 130,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": START,
    "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 48, "d_kv": 16, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_ff": 72,
    "vocab_size": VOCAB_SIZE, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "decoder_start_token_id": START, "pad_token_id": 0, "eos_token_id": 1, "n_positions": 130,
}  # fmt: skip

_T5GEMMA = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
    "intermediate_size": 72, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 130, "sliding_window": 8,
    "query_pre_attn_scalar": 16,
}  # fmt: skip

_T5GEMMA2 = {
    **_T5GEMMA, "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 1, "bos_token_id": START,
}  # fmt: skip
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
_PROPHETNET = {
    "hidden_size": 48, "num_encoder_layers": 3, "num_decoder_layers": 2, "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 60, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 132, "num_buckets": 8, "relative_max_distance": 20, "ngram": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": START,
}  # fmt: skip
_LED = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"}, "attention_window": 8,
    "max_encoder_position_embeddings": 130, "max_decoder_position_embeddings": 100,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("bart", "BartForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "mbart": ("mbart", "MBartForConditionalGeneration", _BART),
    "m2m100": ("m2m_100", "M2M100ForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "marian": ("marian", "MarianMTModel", {**_BART, "activation_function": "swish"}),
    "marian-two-vocabularies": (
        "marian",
        "MarianMTModel",
        {**_BART, "decoder_vocab_size": 190, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ),
    "fsmt": (
        "fsmt",
        "FSMTForConditionalGeneration",
        {**_BART, "src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": 190, "scale_embedding": True},
    ),
    "fsmt-tied": (
        "fsmt",
        "FSMTForConditionalGeneration",
        {**_BART, "src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE, "tie_word_embeddings": True},
    ),
    "pegasus": ("pegasus", "PegasusForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "bigbird-pegasus": (
        "bigbird_pegasus",
        "BigBirdPegasusForConditionalGeneration",
        {**_BART, "scale_embedding": True, "block_size": 4, "num_random_blocks": 2, "pad_token_id": 0},
    ),
    "pegasus-x": (
        "pegasus_x",
        "PegasusXForConditionalGeneration",
        {**_BART, "scale_embedding": True, "block_size": 8, "num_global_tokens": 4},
    ),
    "t5": ("t5", "T5ForConditionalGeneration", _T5),
    "flan-t5": (
        "t5",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("mt5", "MT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "t5gemma": (
        "t5gemma",
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {**_T5GEMMA, "hidden_size": 64, "num_hidden_layers": 3, "final_logit_softcapping": None},
            "decoder": _T5GEMMA,
            "vocab_size": VOCAB_SIZE,
            "decoder_start_token_id": START,
        },
    ),
    "umt5": ("umt5", "UMT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "blenderbot": ("blenderbot", "BlenderbotForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "blenderbot-small": ("blenderbot-small", "BlenderbotSmallForConditionalGeneration", _BART),
    "mvp": ("mvp", "MvpForConditionalGeneration", _BART),
    "plbart": ("plbart", "PLBartForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "led": ("led", "LEDForConditionalGeneration", _LED),
    "longt5": ("longt5", "LongT5ForConditionalGeneration", {**_T5, "local_radius": 6}),
    "switch": (
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {
            **_T5,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "expert_capacity": 10,  # of the longest input of 90 tokens
        },
    ),
    "prophetnet": ("prophetnet", "ProphetNetForConditionalGeneration", _PROPHETNET),
    "t5gemma2": (
        "t5gemma2",
        "T5Gemma2ForConditionalGeneration",
        {
            "encoder": {
                "text_config": {**_T5GEMMA2, "num_hidden_layers": 2},
                "vision_config": _VISION,
                "mm_tokens_per_image": 4,
                "eoi_token_index": 123,  # a token of the tests' inputs
            },
            "decoder": _T5GEMMA2,
            "decoder_start_token_id": START,
        },
    ),
}
"""Name → (model type, class, settings)."""

_AFTER_BLOCKS = ("bart", "blenderbot-small", "fsmt", "led", "marian", "mvp", "plbart", "prophetnet")
"""The model types whose norms are after blocks."""


def write_encoder_decoder(
    folder: Path, name: str, *, generation: dict[str, Any] | None = None, **settings: Any
) -> PreTrainedModel:
    """Writes a checkpoint of random weights; returns the library's model of it.

    Args:
        generation: fields of generation_config.json.
    """
    kind, architecture, own = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(AutoConfig.for_model(kind, **{**own, **settings}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad or (kind == "fsmt" and "embed_positions" in key):  # sinusoids
                continue
            if parameter.dim() > 1 and ("embed" in key or "shared" in key):
                spread = 1.0 if kind in _AFTER_BLOCKS else 0.3
                is_scaled = own.get("scale_embedding") or kind in ("t5gemma", "t5gemma2")
                parameter.normal_(std=spread / (parameter.shape[-1] ** 0.5 if is_scaled else 1))
            elif "lm_head" in key or "output_projection" in key:
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                is_score = any(part in key for part in (".q.", ".k.", "q_proj", "k_proj"))
                parameter.normal_(std=(1.0 if is_score else 2.0) * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.1)
    model.config.architectures = [architecture]
    model.generation_config.update(max_length=None, **(generation or {}))
    model.save_pretrained(folder)
    return model.eval().float()


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, encoder: list[int], decoder: list[int]) -> Tensor:
    """The library's log-probabilities of the token after each of the decoder's: [num_tokens, vocab_size]."""
    _forget_short_texts(model)
    if model.config.model_type in _ONE_BY_ONE:
        return _logprobs_one_by_one(model, encoder, decoder)
    ids = {"input_ids": torch.tensor([encoder]), "decoder_input_ids": torch.tensor([decoder])}
    output = model(**ids, use_cache=False)  # with a cache, FSMT computes several tokens without a causal mask
    return output.logits[0].log_softmax(-1)


def _forget_short_texts(model: PreTrainedModel) -> None:
    """Lets BigBird see blocks again: after a short text, the library's model sees long ones as a whole, too."""
    if model.config.model_type == "bigbird_pegasus":
        model.get_encoder().set_attention_type(model.config.attention_type)


_ONE_BY_ONE = ("prophetnet", "switch_transformers")
"""Types whose code computes several tokens otherwise than one after another, as `generate` does: it mixes up their
biases by distance, or limits how many have the same expert.
"""


def _logprobs_one_by_one(model: Any, encoder: list[int], decoder: list[int]) -> Tensor:
    encoded, cache, rows = model.get_encoder()(torch.tensor([encoder])), None, []
    for token in decoder:
        output = model(
            encoder_outputs=encoded, decoder_input_ids=torch.tensor([[token]]), cache=cache, use_cache=True
        )  # fmt: skip
        cache = output.cache
        rows.append(output.logits[0, -1].log_softmax(-1))
    return torch.stack(rows)


@torch.inference_mode()
def reference_tokens(model: PreTrainedModel, encoder: list[int], num_tokens: int, **options: Any) -> list[int]:
    """The library's greedy output, without the token that the decoder starts with."""
    _forget_short_texts(model)
    output = model.generate(
        torch.tensor([encoder]), do_sample=False, num_beams=1, max_new_tokens=num_tokens, eos_token_id=None, **options
    )
    return output[0, 1:].tolist()
