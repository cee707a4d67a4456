"""Tiny random checkpoints of encoders, and what Transformers computes with them."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 211
_SIZES = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 72,
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 130, "pad_token_id": 1,
}  # fmt: skip

ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "Bert", {"pad_token_id": 0}),
    "roberta": ("roberta", "Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", "XLMRoberta", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    "camembert": ("camembert", "Camembert", {"type_vocab_size": 1}),
    "electra": ("electra", "Electra", {"embedding_size": 24}),
    "electra-wide": ("electra", "Electra", {"embedding_size": 48}),
    "albert": ("albert", "Albert", {"embedding_size": 16, "num_hidden_layers": 4}),
    "albert-wide": ("albert", "Albert", {"embedding_size": 48}),
    "albert-groups": (
        "albert",
        "Albert",
        {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "distilbert": (
        "distilbert",
        "DistilBert",
        {
            "dim": 48, "hidden_dim": 72, "n_heads": 4, "n_layers": 3, "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 130,
        },
    ),
    "mpnet": ("mpnet", "MPNet", {"max_position_embeddings": 300}),
    "mpnet-padding": ("mpnet", "MPNet", {"max_position_embeddings": 300, "pad_token_id": 5}),
    "modernbert": ("modernbert", "ModernBert", {"local_attention": 20, "num_hidden_layers": 4, "pad_token_id": 1}),
    "modernbert-biases": (
        "modernbert",
        "ModernBert",
        {"local_attention": 8, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
    ),
    "eurobert": ("eurobert", "EuroBert", {"num_key_value_heads": 2, "classifier_pooling": "mean"}),
    "eurobert-late": ("eurobert", "EuroBert", {"num_key_value_heads": 2, "classifier_pooling": "late"}),
    "gte": ("gte", "Gte", {}),
    "gte-no-types": ("gte", "Gte", {"type_vocab_size": 0}),
    "nomic": ("nomic_bert", "NomicBert", {}),
    "jina-v3": ("jina_embeddings_v3", "JinaEmbeddingsV3", {}),
    "deberta-v3": (
        "deberta-v2",
        "DebertaV2",
        {
            "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
            "max_relative_positions": -1,
        },
    ),
    "deberta-v2": (
        "deberta-v2",
        "DebertaV2",
        {
            "relative_attention": True, "position_buckets": -1, "share_att_key": False, "pos_att_type": "c2p|p2c",
            "conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 2, "max_relative_positions": 100,
        },
    ),
    "deberta-c2p": (
        "deberta-v2",
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 8, "share_att_key": True},
    ),
}  # fmt: skip
"""Name → (model type, stem of the classes' names, settings)."""

T5_SIZES = {
    "d_model": 48, "d_kv": 16, "num_layers": 3, "num_heads": 4, "d_ff": 72, "vocab_size": VOCAB_SIZE,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
T5: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("t5", "T5", {}),
    "t5-gated": ("t5", "T5", {"feed_forward_proj": "gated-gelu"}),
    "mt5": ("mt5", "MT5", {}),
    "umt5": ("umt5", "UMT5", {}),
}


def tiny_config(kind: str, settings: dict[str, Any]) -> PretrainedConfig:
    sizes = {} if kind == "distilbert" else T5_SIZES if kind in ("t5", "mt5", "umt5") else _SIZES
    return AutoConfig.for_model(kind, **{**sizes, **settings})


def write_encoder(folder: Path, name: str, head: str = "Model", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Writes a checkpoint of random weights, of the class with this `head`; returns the library's model of it."""
    kind, stem, own = ENCODERS.get(name) or T5[name]
    torch.manual_seed(seed)
    config = tiny_config(kind, {**own, **settings})
    model = getattr(transformers, f"{stem}{head}")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in key:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return model.eval().float()


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, token_ids: list[int], token_types: list[int] | None = None) -> Tensor:
    """The library's last hidden states of one sequence: [num_tokens, hidden]."""
    base = model.base_model if not hasattr(model, "encoder") or not hasattr(model, "shared") else model
    options = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    return base(input_ids=torch.tensor([token_ids]), **options).last_hidden_state[0]


TASKS = ["retrieval.query", "separation", "text-matching"]
"""Those with an adapter in the checkpoints of `write_jina`."""
RANK = 2


def write_jina(folder: Path, **settings: Any) -> None:
    """Writes a checkpoint of Jina v3 as the hub has it: XLM-RoBERTa by its config.json, and parametrized weights."""
    write_encoder(folder, "jina-v3", **settings)
    config = json.loads((folder / "config.json").read_bytes())
    hub = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": TASKS, "lora_alpha": 1, "lora_rank": RANK,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": None, **hub}))
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and tensor.dim() == 2:
            out, size = tensor.shape
            sides = ((out, RANK), (RANK, size)) if "embeddings" in name else ((RANK, size), (out, RANK))
            stored[f"{module}.parametrizations.weight.original"] = tensor
            for factor, side in zip(("lora_A", "lora_B"), sides, strict=True):
                stored[f"{module}.parametrizations.weight.0.{factor}"] = torch.randn(len(TASKS), *side) * 0.2
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")


def merged_jina(folder: Path, task: str) -> PreTrainedModel:
    """The library's model of such a checkpoint, with the adapter of a task in its weights; of "none", without."""
    weights = {}
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        module, is_parametrized, kind = name.partition(".parametrizations.weight.")
        if not is_parametrized:
            weights[name] = tensor
        elif kind == "original":
            a, b = (stored[f"{module}.parametrizations.weight.0.{each}"] for each in ("lora_A", "lora_B"))
            left, right = (a, b) if "embeddings" in module else (b, a)
            change = 0 if task == "none" else left[TASKS.index(task)] @ right[TASKS.index(task)] / RANK
            weights[f"{module}.weight"] = tensor + change
    size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    with tempfile.TemporaryDirectory() as plain:
        model = write_encoder(Path(plain), "jina-v3", vocab_size=size)
        save_file(weights, Path(plain) / "model.safetensors", {"format": "pt"})
        return type(model).from_pretrained(plain, dtype=torch.float32).eval()
