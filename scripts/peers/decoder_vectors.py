"""Vectors of long texts by decoders: tokens a second of 64 texts of 512 tokens, each the last token's vector.

    python scripts/peers/decoder_vectors.py make MODELS
    python scripts/peers/decoder_vectors.py compare MODELS/qwen3-embedding-shape --engines quire:float32 \
        quire:bfloat16:int8 --peers llama.cpp --peer-python VENV/bin/python

`make` writes a checkpoint of random weights, of the shape of Qwen3-Embedding 0.6B, and model.gguf beside it with the
same weights in bfloat16 for llama.cpp; it needs this environment's transformers and gguf. Each engine of `compare` runs
in a process of its own, in turn. After `quire:` the dtype and the format of weights that it makes. The peers'
environment has the package xllamacpp.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns  # beside this file

NAME, GGUF = "qwen3-embedding-shape", "model.gguf"
NUM_TEXTS, LENGTH = 64, 512
WORK = f"texts of {LENGTH} tokens, tokens/s"
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_669, "max_position_embeddings": 32_768,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names inside a layer: Transformers' and llama.cpp's."""

Embed = Callable[[list[list[int]]], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="Write the checkpoint.")
    make.add_argument("models", type=Path, help="The folder for it.")
    compare = commands.add_parser("compare", help="Measure engines in turn.")
    compare.add_argument("model", type=Path, help="Folder of the checkpoint.")
    compare.add_argument("--texts", type=int, default=NUM_TEXTS, help="Texts of a measurement (default: %(default)s).")
    turns.add_options(compare)
    args = parser.parse_args()
    if args.command == "make":
        _make(args.models / NAME)
    elif args.measure:
        print(json.dumps(_measure(_start(args.measure, args.model), args.texts)))
    else:
        found = turns.run(args, [__file__, "compare", str(args.model), "--texts", str(args.texts)])
        print(f"| engine | {args.texts} {WORK} |\n|---|---|")
        for name, rates in found.items():
            print(f"| {name} | {statistics.median(rates):.0f} |")


def _measure(embed: Embed, count: int) -> float:
    draw = random.Random(0)
    texts = [[draw.randrange(100, 30_000) for _ in range(LENGTH)] for _ in range(count + 2)]
    embed(texts[:2])
    began = time.perf_counter()
    embed(texts[2:])
    return count * LENGTH / (time.perf_counter() - began)


def _start(name: str, model: Path) -> Embed:
    engine, *settings = name.split(":")
    return ENGINES[engine](model, *settings)


def _quire(model: Path, dtype: str = "auto", quantization: str | None = None) -> Embed:
    from quire import LLM

    llm = LLM(
        str(model), runner="pooling", convert="embed", dtype=dtype, quantization=quantization, max_model_len=2 * LENGTH,
        enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    return lambda texts: llm.embed([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)


def _llama_cpp(model: Path) -> Embed:
    import xllamacpp

    params, threads, rows = xllamacpp.CommonParams(), os.cpu_count() or 1, 4
    params.model.path = str(model / GGUF)
    params.embedding, params.warmup = True, False
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
    params.n_parallel, params.n_ctx = rows, rows * 2 * LENGTH
    params.n_batch = params.n_ubatch = rows * LENGTH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def embed(texts: list[list[int]]) -> object:
        answer = server.handle_embeddings({"input": texts})
        if len(answer.get("data", ())) != len(texts):
            raise SystemExit(f"llama.cpp answered {str(answer)[:300]}")
        return answer

    return embed


ENGINES: dict[str, Callable[..., Embed]] = {"quire": _quire, "llama.cpp": _llama_cpp}


def _make(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder)
    _write_gguf(folder / GGUF, model.state_dict())


def _write_gguf(path: Path, tensors: dict[str, Any]) -> None:
    import gguf
    import torch

    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_rope_freq_base(SIZES["rope_theta"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{index}>" for index in range(SIZES["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * SIZES["vocab_size"])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    for name, tensor in tensors.items():
        stored = _gguf_name(name)
        if stored is None:
            continue
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.float().numpy())
        else:
            rows = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(stored, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str | None:
    """Returns llama.cpp's name of a tensor; None for the head, whose weight is the embedding's."""
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return ends.get(name)
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    main()
