"""Adapters of models that run in a class of Transformers, against PEFT's own log-probabilities."""

from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig

from quire import LLM, LoRARequest
from quire.core.wire.adapters import LoadedAdapter
from quire.core.wire.rank import Layout
from quire.executor.models.transformers import TransformersModel
from quire.executor.models.transformers.adapted_rows import check_rows
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.ops.cpu.libraries import load_kernels
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import transformers_spec
from tests.executor.step.conftest import launched  # noqa: F401
from tests.executor.step.test_model_runner import generate, prompt_of, request, tokens_of
from tests.executor.test_peft_adapters import Scorer, load, logprobs_of, start, trained
from tests.executor.thread_group import on_every_rank

peft = pytest.importorskip("peft")

torch.set_num_threads(1)

PROMPT = prompt_of(3, 24)
SETTINGS: dict[str, dict[str, Any]] = {"cohere2": {"layer_types": ["full_attention"] * 4}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {"target_modules": "all-linear"}),  # there is a file here for it
    "ends": ("cohere2", {"target_modules": ["embed_tokens", "q_proj"]}),
    "stablelm": ("stablelm", {"target_modules": "all-linear", "use_dora": True}),
    "factors": ("stablelm", {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}),
    "new rows": ("apertus", {"target_modules": ["o_proj"], "trainable_token_indices": PROMPT[::7]}),
    "head": ("apertus", {"target_modules": ["lm_head", "up_proj"]}),
    "own attention": ("gptj", {"target_modules": "all-linear"}),
    "experts": (
        "olmoe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "latents": ("minicpm3", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    "row by row": ("gpt_neo", {"target_modules": ["q_proj", "out_proj", "c_fc"]}),
    "states": ("jamba", {"target_modules": ["q_proj", "in_proj", "up_proj"]}),
}


def model_of(worker: Worker) -> Any:
    model = worker.get_model()
    assert isinstance(model, TransformersModel)
    return model


def start_class(folder: Path, group: ParallelGroup | None = None, **changes: Any) -> Worker:
    return start(folder, group, spec=transformers_spec(folder), **changes)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_log_probabilities_of_peft(family: str, tmp_path: Path) -> None:
    """The first step, which traces programs, has an adapter; later ones run from them, in chunks as well."""
    model_type, config = FAMILIES[family]
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, model_type, **SETTINGS.get(model_type, {}))
    model = trained(folder, adapter, **config)
    worker = start_class(folder)
    assert load(worker, adapter) == LoadedAdapter()
    scorer, wanted = Scorer(worker), logprobs_of(model, PROMPT)
    for chunk in (512, 7, 512):
        torch.testing.assert_close(scorer.score(PROMPT, max_num_batched_tokens=chunk), wanted, atol=1e-4, rtol=0)
    fast_path = model_of(worker).fast_path
    if family not in ("row by row", "states"):
        assert fast_path is not None
        assert fast_path.programs is not None, "the step with an adapter has hindered the trace"
    scorer.adapter = -1
    base = scorer.score(PROMPT)
    assert (base - wanted).abs().max() > 1e-2, "the adapter must change something to prove anything"
    if family != "ends":  # the head shares the embedding's weight, and PEFT merges into both
        torch.testing.assert_close(wanted, logprobs_of(model.merge_and_unload(), PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["cohere2", "ends", "head", "experts", "latents"])
def test_two_ranks_have_the_log_probabilities_of_peft(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, config = FAMILIES[family]
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, model_type, **SETTINGS.get(model_type, {}))
    building, check = Lock(), TransformersModel.check_adapters
    monkeypatch.setattr(TransformersModel, "check_adapters", lambda *_: None)  # until both ranks are built
    wanted = logprobs_of(trained(folder, adapter, **config), PROMPT)

    def job(group: ParallelGroup) -> Tensor:
        with building:  # ranks are processes, and do not share Transformers' tables
            worker = start_class(folder, group, layout=Layout(tensor=2))
        assert worker.adapters is not None
        check(model_of(worker), worker.adapters)
        assert load(worker, adapter) == LoadedAdapter()
        return Scorer(worker).score(PROMPT)

    for got in on_every_rank(2, job):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_rows_with_and_without_an_adapter_share_steps(tmp_path: Path) -> None:
    """A class that runs row by row, whose layers see one request at a time."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, "gpt_neo")
    trained(folder, adapter, target_modules=["q_proj", "out_proj", "c_fc"])
    worker = start_class(folder)
    assert load(worker, adapter) == LoadedAdapter()
    requests = [request(f"r{index}", prompt_of(index, 9 + 5 * index), max_tokens=8) for index in range(4)]

    adapter_of = {tuple(each.prompt_token_ids): index % 2 for index, each in enumerate(requests)}

    class Mixed(Scorer):
        def launch(self, plan: Any) -> Any:
            for new in plan.admitted:
                new.adapter = adapter_of[tuple(new.token_ids[: new.num_prompt_tokens])]
            return self._worker.launch(plan)

    runner: Any = Mixed(worker)
    together = tokens_of(generate(runner, requests, enable_prefix_caching=False))
    alone = {}
    for each in requests:
        alone |= tokens_of(generate(runner, [each], enable_prefix_caching=False))
    assert together == alone


def test_a_layer_that_sees_other_rows_takes_no_adapters(tmp_path: Path) -> None:
    """Such as an expert of a class's own loop, which is called for some tokens alone."""
    write_checkpoint(tmp_path, "cohere2")
    worker = start_class(tmp_path)
    place, layers = worker.adapters, model_of(worker)._backbone.layers
    assert place is not None
    called, part, uncalled = (layers[number].self_attn.o_proj for number in (0, 1, 2))

    def run() -> None:
        called(torch.ones(1, 6, 64))
        part(torch.ones(1, 5, 64))

    check_rows(place, [called, part, uncalled], 6, run)
    left = [name for layer in place.layers for name in layer.names if name.endswith("o_proj")]
    assert left == ["model.layers.0.self_attn.o_proj", "model.layers.3.self_attn.o_proj"]
    assert not place.is_active


def test_recorded_steps_read_the_current_adapters(
    launched: list[int],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A decode step from a recording of a traced program has the tokens of one that runs call by call."""
    if load_kernels() is None:
        pytest.skip("plain torch cannot be recorded")
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    write_checkpoint(folder, "stablelm")
    trained(folder, adapter, target_modules="all-linear")
    spec = msgspec.structs.replace(transformers_spec(folder), dtype="bfloat16")
    one, results = [request("a", prompt_of(3, 12), max_tokens=12)], []
    for most_rows in (0, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.executor.step.decode_inputs.MAX_ROWS", most_rows)
            worker = start(folder, spec=spec)
            assert load(worker, adapter) == LoadedAdapter()
            runner: Any = Scorer(worker)
            for number in (1, -1, 1):
                runner.adapter = number
                results.append(tokens_of(generate(runner, one, enable_prefix_caching=False))["a"])
            assert bool(launched) == bool(most_rows)
    assert results[:3] == results[3:]
    assert results[0] == results[2] != results[1]


def test_vectors_of_an_encoder_have_adapters(tmp_path: Path) -> None:
    """Sequences with and without one run together through the class's code."""
    torch.manual_seed(0)
    folder, adapter, prompts = (
        tmp_path / "model",
        tmp_path / "adapter",
        [prompt_of(index, 9 + 7 * index) for index in (1, 2, 3)],
    )
    config = BertConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )  # fmt: skip
    base = AutoModel.from_config(config).eval()
    base.save_pretrained(folder)
    changed = peft.get_peft_model(
        AutoModel.from_pretrained(folder), peft.LoraConfig(r=4, target_modules=r"encoder.*\.(query|value|dense)")
    ).eval()
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 8)
    changed.save_pretrained(adapter)
    choices = [None, LoRARequest("a", 1, str(adapter)), None]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_lora": True, "model_impl": "transformers"}
    with LLM(str(folder), dtype="float32", runner="pooling", pooler_config={"pooling_type": "MEAN"}, **options) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.embed(asked, use_tqdm=False, lora_request=choices)
    for prompt, choice, output in zip(prompts, choices, outputs, strict=True):
        with torch.inference_mode():
            hidden = (changed if choice else base)(torch.tensor([prompt])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, atol=1e-4, rtol=0)
