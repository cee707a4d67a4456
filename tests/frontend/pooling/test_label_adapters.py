"""Adapters of classifiers, which bring a head for labels of their own: PEFT's logits, beside the base model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    PretrainedConfig,
    Qwen3Config,
    RobertaConfig,
)

from quire import LLM, LoRARequest, PoolingParams

peft = pytest.importorskip("peft")

torch.set_num_threads(1)

_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 128, "num_labels": 20, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=16),  # whose head is one layer without a bias
    "bert": BertConfig(**_SIZES),  # one layer with a bias
    "roberta": RobertaConfig(**_SIZES | {"max_position_embeddings": 130}),  # two layers
}
PROMPTS = [[(7 * i + 3 * length) % 300 + 3 for i in range(length)] for length in (5, 21, 40)]


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_labels_are_those_of_peft(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "model"
    base = AutoModelForSequenceClassification.from_config(CONFIGS[family])
    base.save_pretrained(folder)
    models, choices = [base.eval()], [None]
    for number in range(2):
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"] if family == "qwen3" else ["query", "value"]
        )
        own = AutoModelForSequenceClassification.from_pretrained(folder)
        made = peft.get_peft_model(own, config)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 4) ** 0.5)
        made.save_pretrained(tmp_path / str(number))
        models.append(made.eval())
        choices.append(LoRARequest(f"a{number}", number + 1, str(tmp_path / str(number))))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in models]
    with LLM(
        str(folder), dtype="float32", runner="pooling", enable_lora=True, max_loras=2, max_lora_rank=4,
        skip_tokenizer_init=True, max_model_len=100,
    ) as llm:  # fmt: skip
        outputs = llm.classify(
            prompts,
            pooling_params=PoolingParams(use_activation=False),
            use_tqdm=False,
            lora_request=choices * len(PROMPTS),
        )
    for number, output in enumerate(outputs):
        wanted = logits_of(models[number % len(models)], PROMPTS[number // len(models)])
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, atol=1e-4, rtol=0)
