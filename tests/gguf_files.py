"""GGUF files of tiny checkpoints, written as llama.cpp's `convert_hf_to_gguf.py` would, with numbers of any type.

The types that the `gguf` package cannot quantize to are made of random bytes, with scales that give the numbers the
spread of the checkpoint's. So a file goes with a checkpoint of its own: that of the numbers it holds.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

gguf = pytest.importorskip("gguf")

_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
"""Bytes of a block at which float16 scales begin, if not at the first alone."""
_TURNS_NEIGHBOURS = ("llama", "granite", "granitemoe")
_ADDS_ONE = ("gemma", "gemma2", "gemma3")


def make_gguf(
    checkpoint: Path,
    path: Path,
    architecture: str,
    kind: str | dict[str, str] = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    embedding: str = "F32",
    more: dict[str, np.ndarray] | None = None,
    without: str = "$^",
    is_fused: bool = False,
) -> Path:
    """Writes `checkpoint` to the GGUF file `path`, and returns the folder of a checkpoint that holds the same numbers.

    Args:
        kind: ggml's name of the type of the layers' weights, or that of each by a part of its name in the file.
        metadata: more fields, without the architecture in their names.
        embedding: the type of the embedding and the output layer.
        more: tensors that the checkpoint does not have.
        without: an expression for names of tensors that the file leaves out; they are zero in the folder.
        is_fused: whether queries, keys and values are one tensor.
    """
    config = json.loads((checkpoint / "config.json").read_bytes())
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config, dict(metadata or {}), architecture)
    write_tokenizer(writer, checkpoint)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    written: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    threes: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in _one_by_one(load_file(checkpoint / "model.safetensors")).items():
        whole, _, expert = _without_expert(name)
        whole = whole.replace("e_score_correction_bias", "e_score_correction.bias").replace(".sinks", ".sinks.weight")
        stored = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        numbers = tensor.float().numpy()
        is_router = "_inp" in stored or "exp_probs" in stored
        is_layer = numbers.ndim == 2 and "embd" not in stored and stored != "output.weight" and not is_router
        chosen = "F32" if numbers.ndim == 1 or is_router else embedding
        if is_layer:
            chosen = kind if isinstance(kind, str) else next((v for k, v in kind.items() if k in stored), "F32")
        raw, same = _quantized(numbers, chosen)
        written[name] = torch.from_numpy(same.copy())
        if architecture in _TURNS_NEIGHBOURS and ("attn_q." in stored or "attn_k." in stored):
            heads = config["num_attention_heads" if "attn_q." in stored else "num_key_value_heads"]
            raw = _permuted(raw, heads)
        if architecture in _ADDS_ONE and name.endswith("norm.weight"):
            raw = raw + 1
        if stored.endswith("ffn_gate_inp_shexp.weight"):
            raw = raw[0]
        elif stored.endswith("exp_probs_b.bias"):
            raw = raw.reshape(-1)
        elif stored.endswith("shortconv.conv.weight"):
            raw = raw[:, 0]
        if re.search(without, stored):
            written[name].zero_()
        elif is_fused and re.search(r"attn_[qkv]\.", stored):
            threes.setdefault(re.sub(r"attn_[qkv]", "attn_qkv", stored) + f" {chosen}", {})[stored] = raw
        elif expert is None:
            writer.add_tensor(stored, raw, raw_dtype=gguf.GGMLQuantizationType[chosen])
        else:
            stacks.setdefault(f"{stored} {chosen}", []).append(raw)
    for stored, numbers in (more or {}).items():
        writer.add_tensor(stored, numbers)
    for key, three in threes.items():
        stored, chosen = key.split(" ")
        parts = [three[stored.replace("qkv", part)] for part in "qkv"]
        writer.add_tensor(stored, np.concatenate(parts), raw_dtype=gguf.GGMLQuantizationType[chosen])
    for key, parts in stacks.items():
        stored, chosen = key.split(" ")
        writer.add_tensor(stored, np.stack(parts), raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _write_same(checkpoint, path.parent / f"{path.stem}-same", _together(written, architecture))


def _one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of gpt-oss and Granite, which a checkpoint has in one tensor, under the names of single ones."""
    separate = {}
    for name, tensor in tensors.items():
        before, _, kind = name.rpartition(".experts." if ".experts." in name else ".block_sparse_moe.")
        for index in range(len(tensor)):
            stem = f"{before}.experts.{index}"
            if kind in ("gate_up_proj", "gate_up_proj_bias"):  # [expert, in, 2 * size], gates and ups by turns
                ending = "bias" if kind.endswith("bias") else "weight"
                separate[f"{stem}.gate_proj.{ending}"] = _turned(tensor[index])[::2]
                separate[f"{stem}.up_proj.{ending}"] = _turned(tensor[index])[1::2]
            elif kind in ("down_proj", "down_proj_bias"):
                ending = "bias" if kind.endswith("bias") else "weight"
                separate[f"{stem}.down_proj.{ending}"] = _turned(tensor[index])
            elif kind in ("input_linear.weight", "output_linear.weight"):
                stem = f"{before}.block_sparse_moe.experts.{index}"
                parts = {"w2": tensor[index]}
                if kind == "input_linear.weight":
                    parts = dict(zip(("w1", "w3"), tensor[index].chunk(2), strict=True))
                separate |= {f"{stem}.{part}.weight": each for part, each in parts.items()}
            else:
                separate[name] = tensor
                break
    return separate


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _together(written: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """What `_one_by_one` took apart."""
    if architecture not in ("gpt-oss", "granitemoe"):
        return written
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in written.items():
        whole, _, expert = _without_expert(name)
        stacks.setdefault(whole if expert is not None else name, []).append(tensor)
    together = {}
    for whole, parts in stacks.items():
        if ".experts." not in whole:
            together[whole] = parts[0]
        elif architecture == "granitemoe":
            stem = whole.partition(".experts.")[0]
            if ".w1." in whole:
                ups = stacks[whole.replace(".w1.", ".w3.")]
                together[f"{stem}.input_linear.weight"] = torch.cat((torch.stack(parts), torch.stack(ups)), dim=1)
            elif ".w2." in whole:
                together[f"{stem}.output_linear.weight"] = torch.stack(parts)
        else:
            stem, kind = whole.rsplit(".", 2)[0], "_bias" if whole.endswith("bias") else ""
            if ".gate_proj." in whole:
                ups = stacks[whole.replace(".gate_proj.", ".up_proj.")]
                both = torch.stack((torch.stack(parts), torch.stack(ups)), dim=2).flatten(1, 2)
                together[f"{stem}.gate_up_proj{kind}"] = both if kind else both.mT.contiguous()
            elif ".down_proj." in whole:
                together[f"{stem}.down_proj{kind}"] = torch.stack(parts) if kind else torch.stack(parts).mT.contiguous()
    return together


def _without_expert(name: str) -> tuple[str, str, int | None]:
    before, mark, after = name.partition(".experts.")
    if not mark:
        return name, "", None
    number, _, rest = after.partition(".")
    return f"{before}.experts.{rest}", before, int(number)


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of queries and keys."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _quantized(numbers: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(the tensor as it is stored, the numbers that it stands for)."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return numbers, numbers
    try:
        raw = gguf.quants.quantize(numbers, type_)
    except NotImplementedError:
        raw = random_blocks(numbers.shape, kind, float(numbers.std()))
    return raw, gguf.quants.dequantize(raw, type_)


def random_blocks(shape: tuple[int, int], kind: str, spread: float) -> np.ndarray:
    """Random blocks of the numbers of a weight [out, in], whose standard deviation is about `spread`."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(shape[0])
    raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    if kind == "MXFP4":  # a scale is a power of two
        raw[..., 0] = 126 + round(np.log2(spread / 2))
        return raw.reshape(len(raw), -1)

    def with_scale(scale: float) -> np.ndarray:
        for at in _SCALES.get(kind, (0,)):
            scales = rng.uniform(0.8, 1.2, raw.shape[:2]).astype(np.float32) * scale
            raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        return raw.reshape(len(raw), -1)

    return with_scale(spread / float(gguf.quants.dequantize(with_scale(1.0), type_).std()))


def _write_same(checkpoint: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(checkpoint, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_sizes(writer: Any, config: dict[str, Any], more: dict[str, Any], architecture: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(more.pop("attention.head_count_kv", config["num_key_value_heads"]))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    experts = experts or config.get("moe_num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["moe_k"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, value in more.items():
        key = f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)


def write_tokenizer(writer: Any, checkpoint: Path) -> None:
    """Writes the byte-level tokenizer of a checkpoint."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_bytes())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_bytes())
    size = json.loads((checkpoint / "config.json").read_bytes())["vocab_size"]
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [5] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = token, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    template = checkpoint / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else settings["chat_template"])
