"""XLM where config.json says `causal`; otherwise it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.executor.models.base import Model
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.tiny_models import VOCAB_SIZE, tiny_config
from tests.executor.paged_driver import PagedDriver, load_model

TOKENS = [(17 * place * place + place) % (VOCAB_SIZE - 3) + 3 for place in range(40)]


def write(folder: Path, **fields: object) -> AutoModelForCausalLM:
    torch.manual_seed(0)
    config = tiny_config("xlm")
    config.update({"architectures": ["XLMWithLMHeadModel"], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def load(folder: Path, implementation: Any = "auto") -> Model:
    return load_model(
        read_model_spec(folder, ModelConfig(model=str(folder), dtype="float32", model_impl=implementation))
    )


def test_tokens_have_the_language_of_the_configuration(tmp_path: Path) -> None:
    reference = write(tmp_path, n_langs=3, lang_id=2, gelu_activation=False)
    with torch.inference_mode():
        languages = torch.full((1, len(TOKENS)), 2)
        expected = reference(torch.tensor([TOKENS]), langs=languages).logits[0].log_softmax(-1)
    driver = PagedDriver(load(tmp_path), 2, 64, block_size=4)
    parts = [driver.step({0: TOKENS[:13], 1: [5, 6]})[0], driver.step({0: TOKENS[13:]})[0]]
    torch.testing.assert_close(torch.cat(parts).log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_clusters_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"asm": True}))
    with pytest.raises(ModelLoadError, match="clusters"):
        load(tmp_path)


def test_without_causal_it_is_an_encoder(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"causal": False}))
    assert read_model_spec(tmp_path, ModelConfig(model=str(tmp_path))).is_encoder


def test_the_librarys_class_is_refused_for_a_cache_of_its_own(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ModelLoadError, match=r"XLMWithLMHeadModel .*\(it does not go on from the library's cache\)"):
        load(tmp_path, "transformers")
