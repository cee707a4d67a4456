"""DeepSeekMoE against Llama of Transformers with the experts of its DeepSeek V2, which are the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from quire.executor.parallel.groups import ParallelGroup
from tests.executor.paged_driver import PagedDriver, load_model, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)
TOKENS = [5, 9, 200, 17, 33, 4, 250, 61, 7, 8, 90, 12]
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
}  # fmt: skip


def make_deepseek_moe(folder: Path, num_dense: int = 1) -> Tensor:
    """Writes a tiny random checkpoint; returns the log-probabilities [tokens, vocabulary] after each of `TOKENS`."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=2048)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers[num_dense:]:
        layer.mlp = DeepseekV2Moe(DeepseekV2Config(**SIZES, **EXPERTS, topk_method="greedy"))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        scaled = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter.detach() + 0.2 * noise
        parameter.data.copy_(scaled)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for index, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                stem = f"{name.removesuffix('gate_up_proj')}{index}"
                tensors |= {f"{stem}.gate_proj.weight": gate.clone(), f"{stem}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            tensors |= {f"{stem}{index}.down_proj.weight": each.clone() for index, each in enumerate(tensor)}
        else:
            tensors[name] = tensor
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named = {"first_k_dense_replace": num_dense, "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek"}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **EXPERTS, **named}))
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].log_softmax(dim=-1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_are_those_of_transformers(ranks: int, tmp_path: Path) -> None:
    expected = make_deepseek_moe(tmp_path / "checkpoint")

    def logprobs(group: ParallelGroup) -> Tensor:
        driver = PagedDriver(load_model(read_spec(tmp_path / "checkpoint"), group=group), 1, 32)
        return driver.step({0: TOKENS})[0].log_softmax(dim=-1)

    for got in on_every_rank(ranks, logprobs):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
