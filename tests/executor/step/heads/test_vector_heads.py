"""Heads for vectors, classes and scores with a checkpoint's weights, through scheduler and worker: the values are those
of Transformers and of sentence-transformers' formulas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.pooling import PoolerConfig
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError, ModelLoadError
from quire.core.wire.pooling_params import LateChunkingParams, PoolingParams
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.pooling import resolve_pooling
from quire.frontend.requests.pooling_input import PoolingInput
from tests.executor.step.heads.test_pooler import vectors_of
from tests.executor.step.test_model_runner import engine_config, generate, prompt_of, start_worker

PROMPTS = [prompt_of(3, 1), prompt_of(4, 16), prompt_of(5, 40), prompt_of(5, 44)]  # the last two begin alike
Copy = Callable[..., Path]


def pooling_config(folder: Path, **options: Any) -> EngineConfig:
    if isinstance(options.get("pooler_config"), dict):
        options["pooler_config"] = PoolerConfig(**options["pooler_config"])
    model = ModelConfig(model=str(folder), **options)
    spec = read_model_spec(folder, model)
    return engine_config(folder, spec=spec, pooling=resolve_pooling(model, spec))


def computed(folder: Path, params: PoolingParams | None = None, **options: Any) -> list[np.ndarray]:
    """The output for each prompt: [width], or [num_vectors, width] of a task by token."""
    config = pooling_config(folder, **options)
    return outputs_of(config, start_worker(config), params or PoolingParams())


def outputs_of(config: EngineConfig, worker: Worker, params: PoolingParams) -> list[np.ndarray]:
    given = PoolingInput(config.pooling, "tiny", is_encoder=False)
    pooling = given.resolve(params)
    requests = [
        EngineRequest([SequenceStart(str(index), 0)], prompt, SamplingParams(), pooling=pooling)
        for index, prompt in enumerate(PROMPTS)
    ]
    deltas = generate(worker, requests, max_num_batched_tokens=24, depth=3)  # the longer prompts come in parts
    found = [vectors_of([each.output for each in deltas[str(index)]]) for index in range(len(PROMPTS))]
    return found if pooling.method == "all" else [rows[0] for rows in found]


def states_of(folder: Path) -> list[torch.Tensor]:
    """Transformers' last hidden states of each prompt, [num_tokens, hidden] float32."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def check(found: list[np.ndarray], expected: list[torch.Tensor]) -> None:
    for got, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, values.float().numpy(), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def copy(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of a tiny checkpoint with changes to config.json, more tensors, and more files (of JSON, by path)."""

    def make(
        tensors: dict[str, torch.Tensor] | None = None, files: dict[str, Any] | None = None, **config: Any
    ) -> Path:
        source = checkpoint("llama")
        folder = tmp_path_factory.mktemp("copy")
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                (folder / path.name).symlink_to(path)
        own = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | config))
        save_file(load_file(source / "model.safetensors") | (tensors or {}), folder / "model.safetensors")
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return folder

    return make


HIDDEN = 64


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


class TestClassifiers:
    @pytest.mark.parametrize(
        ("problem", "num_labels", "activation"),
        [
            (None, 3, lambda logits: logits.softmax(-1)),
            (None, 1, torch.sigmoid),
            ("single_label_classification", 2, lambda logits: logits.softmax(-1)),
            ("multi_label_classification", 3, torch.sigmoid),
            ("regression", 1, lambda logits: logits),
        ],
    )
    def test_classes_of_a_text(self, copy: Copy, problem: str | None, num_labels: int, activation: Any) -> None:
        folder = copy(
            {"score.weight": random(num_labels, HIDDEN)},
            architectures=["LlamaForSequenceClassification"],
            id2label={str(index): f"label {index}" for index in range(num_labels)},
            problem_type=problem,
            pad_token_id=None,
        )
        reference = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        check(computed(folder), [activation(each) for each in logits])
        check(computed(folder, PoolingParams(use_activation=False)), logits)

    def test_a_decoder_of_transformers(self, copy: Copy, checkpoint: Callable[..., Path]) -> None:
        labels = {"0": "a", "1": "b", "2": "c"}
        folder = copy(
            {"score.weight": random(3, HIDDEN)}, architectures=["LlamaForSequenceClassification"], id2label=labels
        )
        expected = [F.linear(states[-1], random(3, HIDDEN)).softmax(-1) for states in states_of(folder)]
        check(computed(folder, model_impl="transformers"), expected)
        folder = checkpoint("llama")
        vectors = [F.normalize(states[-1], dim=-1) for states in states_of(folder)]
        check(computed(folder, runner="pooling", model_impl="transformers"), vectors)

    def test_dummy_weights(self, checkpoint: Callable[..., Path]) -> None:
        config = replace(pooling_config(checkpoint("llama"), convert="classify"), load=LoadConfig(load_format="dummy"))
        for probabilities in outputs_of(config, start_worker(config), PoolingParams()):
            assert probabilities.shape == (2,)
            assert probabilities.sum() == pytest.approx(1, abs=1e-5)

    def test_classes_of_tokens(self, copy: Copy) -> None:
        tensors = {"score.weight": random(3, HIDDEN), "score.bias": random(3)}
        labels = {"0": "a", "1": "b", "2": "c"}
        folder = copy(tensors, architectures=["LlamaForTokenClassification"], id2label=labels)
        reference = LlamaForTokenClassification.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            expected = [reference(torch.tensor([prompt])).logits[0].softmax(-1) for prompt in PROMPTS]
        check(computed(folder), expected)

    def test_calibration(self, copy: Copy) -> None:
        folder = copy(
            {"score.weight": random(1, HIDDEN)}, architectures=["LlamaForSequenceClassification"], num_labels=1
        )
        expected = [torch.sigmoid((F.linear(states[-1], random(1, HIDDEN)) - 0.25) / 2) for states in states_of(folder)]
        check(computed(folder, pooler_config={"logit_mean": 0.25, "logit_sigma": 2.0}), expected)

    @pytest.mark.parametrize("tie", [False, True])
    def test_scores_by_two_tokens(self, checkpoint: Callable[..., Path], tie: bool) -> None:
        folder = checkpoint("llama", tie=tie)
        tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        no, yes = sorted(tokens, key=tokens.get)[40:42]
        overrides = {
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": [no, yes],
            "is_original_qwen3_reranker": True,
        }
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = [reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
        differences = [each[tokens[yes]] - each[tokens[no]] for each in logits]
        expected = [torch.sigmoid(each).unsqueeze(0) for each in differences]
        check(computed(folder, hf_overrides=overrides), expected)
        rows = overrides | {"method": "no_post_processing"}
        expected = [each[[tokens[no], tokens[yes]]].softmax(-1) for each in logits]
        check(computed(folder, hf_overrides=rows), expected)

    @pytest.mark.parametrize(
        ("tokens", "saved", "activation"),
        [
            ({"true_token_id": 41, "false_token_id": 40}, {}, torch.sigmoid),
            ({"true_token_id": 41, "false_token_id": None}, {}, torch.sigmoid),
            ({"true_token_id": 41}, {"activation_fn": "torch.nn.modules.linear.Identity"}, lambda score: score),
        ],
    )
    def test_scores_of_a_module_of_sentence_transformers(
        self, copy: Copy, tokens: dict[str, Any], saved: dict[str, Any], activation: Any
    ) -> None:
        """The formula of `LogitScore` in sentence-transformers 6.2, and the default activation of its CrossEncoder."""
        kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
            for index, (kind, path) in enumerate(zip(kinds, ("", "1_LogitScore"), strict=True))
        ]
        files = {
            "modules.json": modules,
            "1_LogitScore/config.json": tokens,
            "config_sentence_transformers.json": {"model_type": "CrossEncoder", **saved},
        }
        folder = copy(None, files)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = [reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
        no = tokens.get("false_token_id")
        scores = [each[41] if no is None else each[41] - each[no] for each in logits]
        check(computed(folder), [activation(score).unsqueeze(0) for score in scores])

    def test_rewards_at_the_ends_of_steps(self, copy: Copy) -> None:
        tag = PROMPTS[2][7]
        tensors = {
            "score.0.weight": random(HIDDEN, HIDDEN), "score.0.bias": random(HIDDEN),
            "score.2.weight": random(2, HIDDEN), "score.2.bias": random(2),
        }  # fmt: skip
        folder = copy(tensors, architectures=["LlamaForProcessRewardModel"])
        expected = []
        for prompt, states in zip(PROMPTS, states_of(folder), strict=True):
            inner = F.linear(states, tensors["score.0.weight"], tensors["score.0.bias"]).relu()
            rewards = F.linear(inner, tensors["score.2.weight"], tensors["score.2.bias"]).softmax(-1)
            expected.append(rewards[[index for index, token in enumerate(prompt) if token == tag]])
        assert sum(map(len, expected)) > 1
        check(computed(folder, pooler_config={"step_tag_id": tag}), expected)

    def test_logits_of_tokens_at_the_ends_of_steps(self, checkpoint: Callable[..., Path]) -> None:
        folder, tag = checkpoint("llama"), PROMPTS[2][7]
        config = {"tok_pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [30, 40, 50]}
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = []
        with torch.inference_mode():
            for prompt in PROMPTS:
                places = [index for index, token in enumerate(prompt) if token == tag]
                expected.append(reference(torch.tensor([prompt])).logits[0, places])
        options = {"runner": "pooling", "convert": "classify", "pooler_config": config}
        raw = PoolingParams(task="token_classify", use_activation=False)
        check(computed(folder, raw, **options), [logits[:, [30, 40, 50]] for logits in expected])
        raw = PoolingParams(task="token_classify", use_activation=False, returned_token_ids=[50, 30])
        check(computed(folder, raw, **options), [logits[:, [50, 30]] for logits in expected])

    def test_a_checkpoint_without_a_classifier_is_refused(self, checkpoint: Callable[..., Path]) -> None:
        with pytest.raises(ModelLoadError, match="has no classifier"):
            computed(checkpoint("llama"), runner="pooling", convert="classify")


class TestVectors:
    def test_modules_of_sentence_transformers(self, copy: Copy) -> None:
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
            {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
        ]
        dense = {"in_features": HIDDEN, "out_features": 24, "bias": True}
        dense["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
        files = {
            "modules.json": modules,
            "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
            "2_Dense/config.json": dense,
        }
        folder = copy(None, files, matryoshka_dimensions=[8, 24])
        weight, bias = random(24, HIDDEN), random(24)
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
        states = states_of(folder)
        vectors = [F.linear(each.mean(0), weight, bias).tanh() for each in states]
        check(computed(folder), [F.normalize(each, dim=-1) for each in vectors])
        check(computed(folder, PoolingParams(dimensions=8)), [F.normalize(each[:8], dim=-1) for each in vectors])
        check(computed(folder, PoolingParams(use_activation=False)), vectors)
        tokens = [F.normalize(F.linear(each, weight, bias).tanh(), dim=-1) for each in states]
        check(computed(folder, PoolingParams(task="token_embed")), tokens)
        chunks = PoolingParams(task="token_embed", late_chunking_params=LateChunkingParams(10))
        means = [torch.stack([part.mean(0) for part in each.split(10)]) for each in states]
        check(computed(folder, chunks), [F.normalize(F.linear(each, weight, bias).tanh(), dim=-1) for each in means])

    @pytest.mark.parametrize("way", ["CLS", "LAST", "MEAN"])
    def test_a_bare_decoder(self, copy: Copy, checkpoint: Callable[..., Path], tmp_path: Path, way: str) -> None:
        """A checkpoint as `AutoModel` saves it: without a head, and without the prefix of its tensors."""
        AutoModel.from_pretrained(checkpoint("llama"), dtype=torch.float32).save_pretrained(tmp_path)
        states = states_of(tmp_path)
        chosen = {"CLS": lambda each: each[0], "LAST": lambda each: each[-1], "MEAN": lambda each: each.mean(0)}[way]
        config = {"pooling_type": way}
        check(computed(tmp_path, pooler_config=config), [F.normalize(chosen(each), dim=-1) for each in states])

    def test_the_prefix_cache_gives_the_same_vectors(self, checkpoint: Callable[..., Path]) -> None:
        config = pooling_config(checkpoint("llama"), runner="pooling")
        worker = start_worker(config)
        first, again = (outputs_of(config, worker, PoolingParams()) for _ in range(2))
        check(first, [F.normalize(each[-1], dim=-1) for each in states_of(checkpoint("llama"))])
        assert [each.tobytes() for each in first] == [each.tobytes() for each in again]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"runner": "generate", "convert": "embed"}, "--runner pooling"),
        ({"runner": "pooling", "convert": "none"}, "choose --convert embed or classify"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, "add --runner pooling"),
        ({"runner": "pooling", "pooler_config": {"task": "classify"}}, "serves embed, token_embed"),
        ({"runner": "pooling", "pooler_config": {"logit_mean": 1.0}}, "use --convert classify"),
        ({"runner": "pooling", "pooler_config": {"dimensions": 8}}, "is_matryoshka"),
        ({"convert": "classify", "pooler_config": {"dimensions": 8}}, "use --convert embed"),
        ({"convert": "classify", "hf_overrides": {"classifier_from_token": ["none such"]}}, "has no token 'none such'"),
    ],
)
def test_options_that_contradict_each_other(
    checkpoint: Callable[..., Path], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        pooling_config(checkpoint("llama"), **options)
