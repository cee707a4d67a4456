"""What llama.cpp's converter makes of the tensors of architectures that it rearranges, and files of the result."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_files import gguf, write_tokenizer

Changed = Iterator[tuple[str, Tensor]]
_MEMBER = re.compile(r"(.*(?:\.experts|altup_\w*projections))\.(\d+)(\..*)")
_PLAIN = re.compile(r"embd|altup|laurel|norm|conv1d|ssm_[ad]$|_inp|proj_b|per_layer")
"""Names of tensors that llama.cpp does not quantize, or that a test does not."""

_FUSES = ("chatglm", "bailingmoe2", "mimo2")
"""Architectures whose repositories have queries, keys and values in one tensor, unlike Transformers' class."""


def stored_tensors(checkpoint: Path, architecture: str) -> dict[str, Tensor]:
    """The tensors of `checkpoint` under their names in GGUF files."""
    config = json.loads((checkpoint / "config.json").read_bytes())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.get("num_hidden_layers") or config["n_layer"])
    stored: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        for changed, numbers in CHANGES[architecture](name, tensor.float(), config):
            member = _MEMBER.fullmatch(changed)
            whole = changed if member is None else member[1] + member[3]
            found = table.get_name(whole, try_suffixes=(".weight", ".bias")) or whole
            if member is None:
                stored[found] = numbers
            else:
                stacks.setdefault(found, {})[int(member[2])] = numbers
    stored |= {name: torch.stack([members[index] for index in sorted(members)]) for name, members in stacks.items()}
    if architecture in _FUSES:
        for name in [name for name in stored if ".attn_q." in name]:
            parts = [stored.pop(name.replace("attn_q", part)) for part in ("attn_q", "attn_k", "attn_v")]
            stored[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    if architecture == "minicpm3":
        for length in ("long", "short"):
            stored[f"rope_factors_{length}.weight"] = torch.tensor(config["rope_parameters"][f"{length}_factor"])
    if architecture == "gemma4":  # a quarter of the frequencies of layers that see all tokens
        half = max(len(numbers) for name, numbers in stored.items() if name.endswith("attn_k_norm.weight")) // 2
        stored["rope_freqs.weight"] = torch.tensor([1.0] * (half // 4) + [1e30] * (half - half // 4))
    return stored


def stored_values(checkpoint: Path) -> dict[str, list[float]]:
    """Metadata that are tensors of `checkpoint`: the numbers of Apertus' activations, by layer."""
    values: dict[str, list[float]] = {}
    tensors = load_file(checkpoint / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if ".act_fn." in name:
            values.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(float(tensors[name]))
    return values


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: Path,
    kind: str = "F32",
) -> dict[str, Tensor]:  # fmt: skip
    """Writes a file whose large tensors have the type `kind`, and returns the numbers that it holds.

    Args:
        metadata: without the architecture in their names; None: the file lacks it.
        tokenizer: the folder of a checkpoint that has one.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in ((name, value) for name, value in metadata.items() if value is not None):
        key = name if name.startswith("xielu.") else f"{architecture}.{name}"
        writer.add_key_value(key, value, _type(value), _type(value[0]) if _is_list(value) else None)
    write_tokenizer(writer, tokenizer)
    held = {}
    for name, tensor in tensors.items():
        numbers = tensor.numpy()
        is_plain = tensor.dim() < 2 or tensor.shape[-1] % 32 != 0 or _PLAIN.search(name) is not None
        type_ = gguf.GGMLQuantizationType["F32" if is_plain else kind]
        raw = gguf.quants.quantize(numbers, type_)
        held[name] = torch.from_numpy(gguf.quants.dequantize(raw, type_).reshape(numbers.shape).copy())
        writer.add_tensor(name, raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _type(value: Any) -> Any:
    kinds = gguf.GGUFValueType
    table = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    return table[type(value)]


def _gpt2(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield name, tensor.T.contiguous() if re.search(r"c_(attn|proj|fc)\.weight", name) else tensor


def _falcon(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """All queries, then all keys, then all values; checkpoints have them by KV head."""
    if "query_key_value" in name:
        heads, kv_heads = config["num_attention_heads"], config.get("num_kv_heads") or 1
        head_dim = config["hidden_size"] // heads
        groups = tensor.view(kv_heads, heads // kv_heads + 2, head_dim, -1)
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        tensor = torch.cat([part.flatten(0, 2) for part in parts])
    yield name, tensor


def _deepseek2(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    if name.endswith("kv_b_proj.weight"):
        nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
        k_b, v_b = tensor.unflatten(0, (-1, nope + values)).split((nope, values), dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), k_b.transpose(1, 2).contiguous()
        yield name.replace("kv_b_proj", "v_b_proj"), v_b.contiguous()
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _llama4(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    if name.endswith("gate_up_proj"):
        gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate.contiguous()
        yield name.replace("gate_up_proj", "up_proj.weight"), up.contiguous()
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(1, 2).contiguous()
    else:
        yield name, tensor


def _gemma3n(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield f"{name}.weight" if name.endswith("_scale") else name, tensor


def _gemma4(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    layer = re.match(r"model\.layers\.(\d+)", name)
    if layer and name.endswith("router.scale"):
        yield f"blk.{layer[1]}.ffn_gate_inp.scale", tensor
    elif layer and name.endswith("per_expert_scale"):
        yield f"blk.{layer[1]}.ffn_down_exps.scale", tensor
    else:
        yield f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")) else name, tensor


def _recurrent(name: str, tensor: Tensor, num_groups: int) -> tuple[str, Tensor]:
    """What Mamba 2 and delta rules have in common; `num_groups` is 0 for delta rules, whose heads have no dimension."""
    if name.endswith(("A_log", ".D")):
        tensor = -tensor.exp() if name.endswith("A_log") else tensor
        tensor = tensor.unsqueeze(1) if num_groups else tensor
    elif "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    elif num_groups and name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(num_groups, -1)
    return re.sub(r"\.dt_bias$", ".dt_proj.bias", name), tensor


def _qwen3next(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    name, tensor = _recurrent(name, tensor, 0)
    if name.endswith("in_proj_qkvz.weight"):
        keys = config["linear_num_key_heads"]
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        values = config["linear_num_value_heads"] // keys * value
        parts = [
            part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split((key, key, values, values), dim=1)
        ]
        yield name.replace("qkvz", "qkv"), torch.cat(parts[:3])
        yield name.replace("qkvz", "z"), parts[3]
    else:
        is_offset = name.endswith("norm.weight") and "linear_attn.norm" not in name
        yield name, tensor + 1 if is_offset else tensor


def _qwen35(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """Value heads in turns of their key heads, and not by key head."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate.contiguous()
        yield name.replace("gate_up_proj", "up_proj.weight"), up.contiguous()
        return
    if name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
        return
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * keys * config["linear_key_head_dim"]

    def in_turns(part: Tensor, dim: int = 0) -> Tensor:
        heads = part.unflatten(dim, (keys, values // keys, part.shape[dim] // values))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    if re.search(r"in_proj_qkv\.|conv1d\.", name):
        tensor = torch.cat((tensor[:first], in_turns(tensor[first:])))
    elif re.search(r"in_proj_[zab]\.|\.A_log$|\.dt_bias$", name):
        tensor = in_turns(tensor)
    elif "linear_attn.out_proj." in name:
        tensor = in_turns(tensor, 1)
    yield from _qwen3next(name, tensor, config)


def _neighbours(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Queries and keys in the order in which a rotation turns neighbours."""
    if match := re.search(r"\.([qk])_proj\.weight", name):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _granitehybrid(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    if ".input_linear." in name:
        is_shared = "shared_mlp" in name
        shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
        stem = name.partition(".shared_mlp" if is_shared else ".block_sparse_moe")[0]
        for part, size in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=-2), strict=True):
            yield f"{stem}.{shared if is_shared else 'mlp.experts'}.{part}.weight", size.contiguous()
    elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
    else:
        name, tensor = _recurrent(name, tensor, config["mamba_n_groups"])
        yield name, _neighbours(name, tensor, config)


def _nemotron_h(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    name, tensor = _recurrent(name, tensor, config["n_groups"])
    yield name, _neighbours(name, tensor, config)  # although nothing rotates


def _lfm2moe(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    name = re.sub(r"\.expert_bias$", ".expert_bias.bias", name)
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


def _mamba(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """Also the mixers of Jamba, and its experts."""
    tensor = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    yield name, -tensor.exp() if name.endswith(".A_log") else tensor


def _mamba2(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield _recurrent(name, tensor, config["n_groups"])


def _falcon_h1(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """With the multipliers."""
    groups = config["mamba_n_groups"] * config["mamba_d_state"]
    inner = config["mamba_d_ssm"]
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    sections = zip((inner, inner, groups, groups, config["mamba_n_heads"]), config["ssm_multipliers"], strict=True)
    parts = torch.cat([torch.full((size,), factor) for size, factor in sections]) * config["ssm_in_multiplier"]
    factors: dict[str, float | Tensor] = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * into, "q_proj": into, "v_proj": into,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "in_proj": parts.unsqueeze(1), "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    yield _recurrent(name, tensor * factors.get(name.split(".")[-2], 1.0), config["mamba_n_groups"])


def _turned(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield name, _neighbours(name, tensor, config)


def _apertus(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """Numbers of the activation become metadata."""
    if ".act_fn." not in name:
        yield name, tensor


def _same(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield name, tensor


def _nemotron(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _gptneox(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """All queries, then all keys, then all values; checkpoints have them by head."""
    if "query_key_value" in name:
        heads = config["num_attention_heads"]
        tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    yield name, tensor


def _bloom(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """All queries, then all keys, then all values; checkpoints have them by head."""
    if "query_key_value" in name:
        tensor = tensor.unflatten(0, (config["n_head"], 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    yield name.removeprefix("transformer."), tensor


def _mistral4(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """Experts lie in two stacks, of which one has gates and ups."""
    yield from _deepseek2(f"{name}.weight" if ".experts." in name else name, tensor, config)


def _mimo2(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """`_FUSES` queries, keys and values afterwards."""
    name = re.sub(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2.", name)
    yield from _corrected(f"{name}.weight" if "attention_sink" in name else name, tensor, config)


def _corrected(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _bailing_moe2(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """`_FUSES` queries, keys and values afterwards."""
    name = re.sub(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2.", name)
    yield from _corrected(name, tensor, config)


def _afmoe(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    yield re.sub(r"\.expert_bias$", ".expert_bias.bias", name), tensor


def _kimi_linear(name: str, tensor: Tensor, config: dict[str, Any]) -> Changed:
    """Hub repositories call a dense block `mlp`, unlike what Transformers writes."""
    name = re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)
    name = re.sub(r"\.dt_bias$", ".dt_proj.bias", name)
    if "_conv1d." in name:
        tensor = tensor.flatten(1).view(1, tensor.shape[0], 1, -1)
    elif name.endswith("A_log"):
        tensor = -tensor.exp()
    yield from _deepseek2(name, tensor, config)


CHANGES: dict[str, Callable[[str, Tensor, dict[str, Any]], Changed]] = {
    "gpt2": _gpt2,
    "falcon": _falcon,
    "bloom": _bloom,
    "mimo2": _mimo2,
    "mistral4": _mistral4,
    "deepseek2": _deepseek2,
    "glm-dsa": _deepseek2,
    "llama4": _llama4,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "lfm2moe": _lfm2moe,
    "mamba": _mamba,
    "jamba": _mamba,
    "mamba2": _mamba2,
    "falcon-h1": _falcon_h1,
    "nemotron": _nemotron,
    "gptneox": _gptneox,
    "afmoe": _afmoe,
    "apertus": _apertus,
    "hunyuan-moe": _same,
    "minicpm3": _same,
    "bailingmoe2": _bailing_moe2,
    "kimi-linear": _kimi_linear,
    **dict.fromkeys(("dots1", "exaone-moe"), _corrected),
    **dict.fromkeys(("smollm3", "minicpm", "mistral3", "internlm2", "arcee", "olmo"), _turned),
    **dict.fromkeys(("deepseek", "bailingmoe"), _turned),
    **dict.fromkeys(
        ("seed_oss", "exaone4", "stablelm", "ernie4_5", "hunyuan-dense", "exaone", "phi2", "starcoder"), _same
    ),
    **dict.fromkeys(("chatglm", "qwen2vl", "qwen3vl", "qwen3vlmoe"), _same),
}
"""Of a tensor of a checkpoint, what files have of it: names of checkpoints, or of files where `gguf` knows none."""
