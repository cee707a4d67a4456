"""LED (arXiv:2004.05150): BART whose encoder sees windows, and no token beyond its own, as in the library without a
`global_attention_mask`.
"""

from typing import ClassVar

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.models.encoder_decoders.bart import BartForConditionalGeneration
from quire.executor.weights.rearranged import Piece
from quire.ops.backend import AttentionForm


class LEDForConditionalGeneration(BartForConditionalGeneration):
    """Each side has a number of positions of its own."""

    SIZES = (*BartForConditionalGeneration.SIZES, "max_encoder_position_embeddings", "max_decoder_position_embeddings")
    BASE = "led"
    ENCODER_PIECES: ClassVar = {
        "self_attn.q_proj": Piece("self_attn.longformer_self_attn.query"),
        "self_attn.k_proj": Piece("self_attn.longformer_self_attn.key"),
        "self_attn.v_proj": Piece("self_attn.longformer_self_attn.value"),
        "self_attn.o_proj": Piece("self_attn.output"),
    }
    first_position = 0

    def encoder_form(self, spec: ModelSpec, head_dim: int, index: int) -> AttentionForm:
        window = spec.hf_config.get("attention_window", 512)
        window = window[index] if isinstance(window, list) and index < len(window) else window
        if not isinstance(window, int) or window < 2 or window % 2:
            raise ModelLoadError(
                f"config.json of {spec.name}: attention_window must be an even number, or one for each layer of the "
                f"encoder, got {spec.hf_config.get('attention_window')!r}."
            )
        return AttentionForm(head_dim**-0.5, window=window // 2 + 1)
