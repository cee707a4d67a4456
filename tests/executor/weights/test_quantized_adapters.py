"""Adapters on quantized weights of every format, against PEFT on a checkpoint that holds the same numbers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.wire.adapters import LoadedAdapter
from quire.executor.weights.quantization.formats.gguf_blocks import FORMATS as BLOCKS
from quire.executor.weights.quantization.int8 import quantize
from quire.executor.weights.quantization.online import ONLINE
from quire.ops.quantized import dequantize
from tests.executor.paged_driver import Checkpoints, read_spec
from tests.executor.step.test_model_runner import prompt_of
from tests.executor.test_peft_adapters import Scorer, load, logprobs_of, start, trained
from tests.executor.weights.test_gguf import Served, served  # noqa: F401
from tests.executor.weights.test_quantized_checkpoints import FORMATS, LINEAR, ROUND_SIZES, write

torch.set_num_threads(1)

PROMPT = prompt_of(3, 24)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
"""Multiples of each group."""


def check(packed: Path, plain: Path, adapter: Path, **options: Any) -> None:
    """Compares a server of `packed` with PEFT's model of `plain`.

    DoRA measures the rows of the base weights, so the adapter depends on their numbers.
    """
    wanted = logprobs_of(trained(plain, adapter, target_modules="all-linear", use_dora=True), PROMPT)
    worker = start(packed, spec=read_spec(packed), **options)
    assert load(worker, adapter) == LoadedAdapter()
    scorer = Scorer(worker)
    torch.testing.assert_close(scorer.score(PROMPT), wanted, atol=1e-4, rtol=0)
    scorer.adapter = -1
    assert (scorer.score(PROMPT) - wanted).abs().max() > 1e-2


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", FORMATS)
def test_adapters_on_each_format(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    check(*write(checkpoint("qwen3", **ROUND_SIZES.get(name, SIZES)), tmp_path, FORMATS[name]), tmp_path / "adapter")


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", BLOCKS)
def test_adapters_on_each_type_of_gguf(kind: str, served: Served, tmp_path: Path) -> None:  # noqa: F811
    folder, same = served("llama", "llama", kind, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    check(folder, same, tmp_path / "adapter")


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ONLINE)
def test_adapters_on_weights_that_are_quantized_at_load(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, plain = checkpoint("qwen3", tie=False, **WIDE), tmp_path / "plain"
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if LINEAR.fullmatch(key):
            tensors[key] = dequantize(ONLINE[name]._rounded(tensor))
        elif key == "lm_head.weight":
            tensors[key] = dequantize(quantize(tensor))
    save_file(tensors, plain / "model.safetensors")
    check(folder, plain, tmp_path / "adapter", quantization=name)


def test_new_rows_of_a_head_that_is_quantized_at_load(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """They are as the adapter says, whatever the rows that they replace were rounded to."""
    folder, plain, adapter = checkpoint("qwen3", tie=False), tmp_path / "plain", tmp_path / "adapter"
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if LINEAR.fullmatch(key) or key == "lm_head.weight":
            tensors[key] = dequantize(quantize(tensor))
    save_file(tensors, plain / "model.safetensors")
    config = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": PROMPT[1::7]}}
    wanted = logprobs_of(trained(plain, adapter, **config), PROMPT)
    worker = start(folder, spec=read_spec(folder), quantization="int8")
    assert load(worker, adapter) == LoadedAdapter()
    torch.testing.assert_close(Scorer(worker).score(PROMPT), wanted, atol=1e-4, rtol=0)
