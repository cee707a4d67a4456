"""Which checkpoints are encoders, by their config.json."""

from typing import Any

import pytest

from quire.frontend.checkpoint.encoders import is_encoder


@pytest.mark.parametrize(
    ("config", "architecture", "expected"),
    [
        ({"model_type": "bert"}, "BertModel", True),
        ({"model_type": "bert"}, "BertForSequenceClassification", True),
        ({"model_type": "bert"}, "BertLMHeadModel", False),
        ({"model_type": "roberta"}, "RobertaForCausalLM", False),
        ({"model_type": "new"}, "NewModel", True),
        ({"model_type": "t5"}, "T5EncoderModel", True),
        ({"model_type": "t5"}, "T5ForConditionalGeneration", False),
        ({"model_type": "qwen2"}, "Qwen2Model", False),
        ({"model_type": "qwen2", "is_causal": False}, "Qwen2ForCausalLM", True),
        ({"model_type": "qwen2", "is_causal": True}, "Qwen2ForCausalLM", False),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "Gemma3TextModel", True),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "Gemma3ForCausalLM", False),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": False}, "Gemma3TextModel", False),
    ],
)
def test_encoders(config: dict[str, Any], architecture: str, expected: bool) -> None:
    assert is_encoder(config, architecture) is expected
