"""Encoders in their class of Transformers: hidden states, labels and scores, together and alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ModelLoadError
from quire.executor.models.registry import is_native
from quire.executor.models.vector_heads import build_heads
from quire.frontend.checkpoint.encoders import ENCODER_TYPES
from tests.executor.models.any_encoder import MODEL_TYPES, PROMPTS, encode, measure, output_of, write_checkpoint
from tests.executor.models.coverage import TOLERANCE
from tests.executor.paged_driver import load_model, model_context, read_spec, transformers_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

CLASSES = [
    ("bert", "BertModel"),  # its attention is ours
    ("roberta", "RobertaForSequenceClassification"),  # positions begin behind padding
    ("modernbert", "ModernBertForTokenClassification"),  # windows on both sides
    ("ernie", "ErnieForMaskedLM"),
    ("megatron-bert", "MegatronBertForSequenceClassification"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification"),  # experts, sinks and windows
    ("deberta", "DebertaForSequenceClassification"),  # attention in the class's own code
    ("longformer", "LongformerForSequenceClassification"),  # the whole class says which token sees all
    ("xlnet", "XLNetForSequenceClassification"),  # labels of the last token
    ("fnet", "FNetForMaskedLM"),  # no attention
    ("mobilebert", "MobileBertForMaskedLM"),  # the head reads a weight itself
    ("switch_transformers", "SwitchTransformersEncoderModel"),  # so do experts
    ("clip_text_model", "CLIPTextModel"),  # tokens see earlier ones alone
]


@pytest.mark.turns(4)
@pytest.mark.parametrize(("model_type", "name"), CLASSES)
def test_a_class_computes_what_transformers_does(model_type: str, name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, model_type, name)
    assert measure(tmp_path, reference, "transformers") < TOLERANCE


def loaded(folder: Path, **options: Any) -> tuple[Any, Any]:
    """(the model in its class of Transformers, the operations)."""
    spec = transformers_spec(folder)
    model = load_model(spec, **options)
    assert not is_native(model)
    return model, model_context(spec).ops


def test_ranks_compute_the_same(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "ernie", "ErnieForSequenceClassification")

    def run(group: Any) -> tuple[list[Tensor], Tensor]:
        model, ops = loaded(tmp_path, group=group)
        with torch.inference_mode():
            states = encode(model, PROMPTS, ops)
            return states, model.classify(torch.stack([each[0] for each in states]))

    for states, logits in on_every_rank(2, run):
        assert len(states) == len(PROMPTS)
        for row, prompt in zip(logits, PROMPTS, strict=True):
            torch.testing.assert_close(row, output_of(reference, prompt).logits[0], atol=1e-5, rtol=0)


def test_a_text_with_special_tokens_changes_no_other(tmp_path: Path) -> None:
    """ESM scales embeddings by the share of masks, which its code counts in a whole row."""
    reference = write_checkpoint(tmp_path, "esm", "EsmModel")
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert config["token_dropout"]
    masked = [7, config["mask_token_id"], 9, config["mask_token_id"]]
    model, ops = loaded(tmp_path)
    with torch.inference_mode():
        together = encode(model, [PROMPTS[0], masked, PROMPTS[2]], ops)
    for states, prompt in zip(together, (PROMPTS[0], masked, PROMPTS[2]), strict=True):
        torch.testing.assert_close(states, output_of(reference, prompt)[0][0], atol=1e-4, rtol=0)


def test_more_tokens_than_positions_come_in_parts(tmp_path: Path) -> None:
    """A step may have more tokens than the class's tables, such as that of its token types, have places."""
    reference = write_checkpoint(tmp_path, "bert", "BertModel")
    model, ops = loaded(tmp_path)
    prompts = [PROMPTS[3]] * 5
    with torch.inference_mode():
        for states in encode(model, prompts, ops):
            torch.testing.assert_close(states, output_of(reference, PROMPTS[3])[0][0], atol=1e-4, rtol=0)


def test_a_text_that_the_class_cannot_compute_fails_alone(tmp_path: Path) -> None:
    """Funnel's code raises for a text of one token."""
    reference = write_checkpoint(tmp_path, "funnel", "FunnelModel")
    model, ops = loaded(tmp_path)
    with torch.inference_mode():
        first, short, last = encode(model, [PROMPTS[0], [5], PROMPTS[2]], ops)
    assert bool(short.isnan().all())
    for states, prompt in ((first, PROMPTS[0]), (last, PROMPTS[2])):
        torch.testing.assert_close(states, output_of(reference, prompt)[0][0], atol=1e-4, rtol=0)


def test_a_pooler_that_nothing_needs_may_be_missing(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "ernie", "ErnieModel")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    model, ops = loaded(tmp_path)
    with torch.inference_mode():
        [states] = encode(model, PROMPTS[:1], ops)
    torch.testing.assert_close(states, output_of(reference, PROMPTS[0])[0][0], atol=1e-4, rtol=0)


def test_labels_of_another_vector_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "xlnet", "XLNetForSequenceClassification")
    spec = read_spec(tmp_path)
    model: Any = load_model(spec)
    assert [*model.label_poolings] == ["LAST"]
    pooling = PoolingSpec(tasks=["classify"], sequence="CLS", classes=["a", "b", "c"], embedding_size=64)
    with pytest.raises(ModelLoadError, match=r"pooling LAST, not of CLS; serve it with --pooler-config\.pooling_type"):
        build_heads(spec, pooling, model_context(spec), model)


@pytest.mark.parametrize(
    ("model_type", "name", "fault"),
    [
        ("eurobert", "EuroBertForSequenceClassification", "follow from other states than the first token's"),
        ("funnel", "FunnelForSequenceClassification", "has hidden states for 5 of 9 tokens, and not one for each"),
    ],
)
def test_what_is_no_vector_of_a_token_is_refused(model_type: str, name: str, fault: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type, name)
    with pytest.raises(ModelLoadError, match=fault):
        load_model(transformers_spec(tmp_path))


def test_the_library_knows_the_types_of_encoders() -> None:
    assert {name for name in ENCODER_TYPES if name not in CONFIG_MAPPING} == {"llama_bidirec", "new", "nvembed"}
    assert {name for name in ENCODER_TYPES if name not in MODEL_TYPES} == {"llama_bidirec", "new", "nvembed"}
