"""Each field that config.json may leave out, left out: the model is that of Transformers for the same config.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.core.config.model import ModelConfig
from quire.executor.models.architectures import ARCHITECTURES
from quire.executor.models.decoder import SettingError
from quire.frontend.checkpoint.model_spec import make_model_spec
from tests.executor.models.tiny_models import MODEL_TYPES, VOCAB_SIZE, write_checkpoint
from tests.executor.paged_driver import PagedDriver, load_model

torch.set_num_threads(1)

NATIVE = [name for name in MODEL_TYPES if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] in ARCHITECTURES]
TOKENS = torch.randint(3, VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 1e-4

_NAMES = {"architectures", "model_type", "transformers_version", "dtype"}
"""Fields that say what the others are."""
_LAYERS = {"nemotron_h": "layers_block_type"}
"""Without it, a Nemotron-H would have four layers, which is no checkpoint's default."""
_TIED = "tie_word_embeddings"
"""The files decide what is tied; `test_tied_models.py` has that."""

Config = dict[str, Any]


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", NATIVE)
def test_a_field_that_is_left_out_is_that_of_the_class(model_type: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    whole: Config = json.loads((tmp_path / "config.json").read_bytes())
    kind: type[PreTrainedModel] = AutoModelForCausalLM  # type: ignore[assignment]
    reference = kind.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for names, config, theirs in _shortened(whole, reference):
        try:
            ours = _ours(tmp_path, config)
        except SettingError:  # which leaves the checkpoint to the library's class
            continue
        assert (ours - theirs).abs().max().item() < TOLERANCE, names


def _shortened(whole: Config, reference: PreTrainedModel) -> Iterator[tuple[list[str], Config, Tensor]]:
    """(names, config without these fields, Transformers' log-probabilities).

    First come all those fields at once without which the class makes the same of config.json, and then one field at a
    time that makes a difference, unless the stored weights have other sizes then.
    """
    without: list[str] = []
    differing: list[str] = []
    same = _resolved(whole)
    for name in whole.keys() - {*_NAMES, _LAYERS.get(whole["model_type"])}:
        if _resolved(_less(whole, [name])) != same:
            differing.append(name)
        elif _resolved(_less(whole, [*without, name])) == same:
            without.append(name)
    yield without, _less(whole, without), _logprobs(reference)
    shapes = _shapes(reference)
    for name in sorted({*differing} - {_TIED}):
        config = _less(whole, [name])
        try:
            with torch.device("meta"):
                has_same_sizes = _shapes(_model(config)) == shapes
            if not has_same_sizes:
                continue
            model = _model(config)
            model.load_state_dict(reference.state_dict())
            theirs = _logprobs(model)
        except Exception:  # the library has no such model, or one that cannot compute
            continue
        yield [name], config, theirs


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _less(config: Config, names: list[str]) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _resolved(config: Config) -> str | None:
    try:
        values = _config(config).to_dict()
    except Exception:  # a class may refuse what is left
        return None
    return json.dumps(values, sort_keys=True, default=str)


def _config(config: Config) -> PretrainedConfig:
    return CONFIG_MAPPING[config["model_type"]].from_dict(PretrainedConfig._decode_special_floats(dict(config)))


def _model(config: Config) -> PreTrainedModel:
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            _config(config), dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@torch.inference_mode()
def _logprobs(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)


def _ours(folder: Path, config: Config) -> Tensor:
    options = ModelConfig(model=folder.name, dtype="float32", model_impl="quire")
    spec = make_model_spec(config, folder, options, folder / "config.json", folder)
    return PagedDriver(load_model(spec), 1, 64, block_size=4).step({0: TOKENS})[0].log_softmax(-1)
