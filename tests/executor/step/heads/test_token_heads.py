"""Heads for tokens, of bge-m3 (arXiv:2402.03216) and ColBERT (2004.12832), on the library's hidden states."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.requests.pooling_input import PoolingInput
from tests.executor.models.tiny_encoders import hidden_states, write_encoder
from tests.executor.step.heads.test_pooler import vectors_of
from tests.executor.step.heads.test_vector_heads import pooling_config
from tests.executor.step.test_model_runner import generate, start_worker

BOS, EOS, SIZE = 0, 2, 48
PROMPTS = [[BOS, 7, 8, 9, EOS], [BOS, 30, EOS], [11, 12, 13]]
"""The last one has neither end."""


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a tiny bge-m3, the library's model of it)."""
    folder = tmp_path_factory.mktemp("m3")
    reference = write_encoder(folder, "xlm-roberta", bos_token_id=BOS, eos_token_id=EOS, max_position_embeddings=300)
    torch.manual_seed(3)
    torch.save(torch.nn.Linear(SIZE, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(torch.nn.Linear(SIZE, SIZE).state_dict(), folder / "colbert_linear.pt")
    return folder, reference


def outputs(folder: Path, pooler: dict[str, Any] | None = None, **params: Any) -> tuple[PoolingSpec, list[np.ndarray]]:
    config = pooling_config(folder, dtype="float32", pooler_config=pooler)
    assert config.pooling is not None
    given = PoolingInput(config.pooling, "tiny", is_encoder=True).resolve(PoolingParams(**params))
    requests = [
        EngineRequest([SequenceStart(str(index), 0)], prompt, SamplingParams(), pooling=given)
        for index, prompt in enumerate(PROMPTS)
    ]
    deltas = generate(start_worker(config), requests, max_num_batched_tokens=128, kv_groups=(), whole_prompts=True)
    return config.pooling, [vectors_of([each.output for each in deltas[str(index)]]) for index in range(len(PROMPTS))]


def linear(folder: Path, name: str, x: Tensor) -> Tensor:
    stored = torch.load(folder / name, weights_only=True)
    return F.linear(x, stored["weight"], stored["bias"])


def test_a_vector_of_each_token_but_the_first(m3: tuple[Path, Any]) -> None:
    folder, reference = m3
    spec, found = outputs(folder, task="token_embed")
    assert spec.tasks == ["embed", "token_embed", "token_classify", "embed&token_classify"]
    for vectors, prompt in zip(found, PROMPTS, strict=True):
        expected = F.normalize(linear(folder, "colbert_linear.pt", hidden_states(reference, prompt)), dim=-1)
        expected = expected[1:] if prompt[0] == BOS else expected
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_weight_of_each_token_between_the_ends(m3: tuple[Path, Any]) -> None:
    folder, reference = m3
    _, found = outputs(folder, task="token_classify")
    for weights, prompt in zip(found, PROMPTS, strict=True):
        expected = torch.relu(linear(folder, "sparse_linear.pt", hidden_states(reference, prompt)))
        expected = expected[1:-1] if prompt[0] == BOS else expected
        np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_the_vector_of_a_text_stays_that_of_the_first_token(m3: tuple[Path, Any]) -> None:
    folder, reference = m3
    _, found = outputs(folder, task="embed")
    for [vector], prompt in zip(found, PROMPTS, strict=True):
        np.testing.assert_allclose(vector, F.normalize(hidden_states(reference, prompt)[0], dim=-1), atol=1e-5)


@pytest.mark.parametrize("pooling", ["CLS", "LAST", "MEAN"])
def test_the_vector_of_a_text_before_the_weights_of_its_tokens(m3: tuple[Path, Any], pooling: str) -> None:
    """One list of numbers, as vLLM's pooler of bge-m3 joins them for plugins."""
    folder, reference = m3
    _, found = outputs(folder, {"seq_pooling_type": pooling}, task="embed&token_classify")
    for numbers, prompt in zip(found, PROMPTS, strict=True):
        states = hidden_states(reference, prompt)
        vector = F.normalize({"CLS": states[0], "LAST": states[-1], "MEAN": states.mean(0)}[pooling], dim=-1)
        weights = torch.relu(linear(folder, "sparse_linear.pt", states))
        weights = weights[1:-1] if prompt[0] == BOS else weights
        np.testing.assert_allclose(numbers, torch.cat([vector, weights.flatten()]).unsqueeze(1), atol=1e-5)


def test_a_file_of_another_size_is_refused(m3: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = m3
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sparse_linear.pt").unlink()
    torch.save(torch.nn.Linear(SIZE + 1, 1).state_dict(), tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match="has no weight of 48 inputs"):
        outputs(tmp_path, task="token_classify")


@pytest.mark.parametrize("place", ["config.json", "artifact.metadata"])
def test_vectors_of_tokens_of_colbert(place: str, tmp_path: Path) -> None:
    """`HF_ColBERT` (arXiv:2004.12832): BERT, and a linear layer of its own."""
    reference = write_encoder(tmp_path, "bert", "ForMaskedLM", max_position_embeddings=300)
    weight = torch.randn(12, SIZE, generator=torch.Generator().manual_seed(1))
    save_file(load_file(tmp_path / "model.safetensors") | {"linear.weight": weight}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = json.loads((tmp_path / place).read_text()) if place == "config.json" else {}
    (tmp_path / place).write_text(json.dumps(own | {"dim": 12}))
    spec, found = outputs(tmp_path)
    assert (spec.tasks, spec.embedding_size) == (["token_embed"], 12)
    for vectors, prompt in zip(found, PROMPTS, strict=True):
        expected = F.normalize(F.linear(hidden_states(reference, prompt), weight), dim=-1)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
