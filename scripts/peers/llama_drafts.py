"""llama.cpp's own server with its look-ups, on the weights that copy. Runs in an environment with xllamacpp."""

import json
import os
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from copying import copied, copying_prompts, copying_weights  # beside this file


def _write_gguf(path: Path, shape: dict[str, Any]) -> None:
    """Writes the weights of `copy:...` as a GGUF file. Its tokens have no texts that mean anything."""
    import gguf
    import torch

    layers, writer = shape["num_hidden_layers"], gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{token}>" for token in range(shape["vocab_size"])])
    writer.add_token_types([1] * shape["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(shape["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for name, tensor in copying_weights(shape).items():
        own = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1:
            writer.add_tensor(own, tensor.float().numpy())
        else:
            writer.add_tensor(own, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(path: Path, shape: dict[str, Any], how: str, works: Sequence[tuple[int, int]]) -> list[float]:
    """Returns tokens a second of each of `works`: (streams, tokens of each).

    Args:
        path: of the GGUF file, which is written.
        how: the look-up, perhaps with a number of equal tokens.
    """
    _write_gguf(path, shape)
    server = _serve(path, how)  # it ends with the object

    def ask(prompt: list[int], num_tokens: int) -> None:
        body = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "temperature": 0, "return_tokens": True}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            tokens = json.load(answer)["tokens"]
        assert tokens == copied(prompt, num_tokens), "it does not copy"

    rates = []
    with ThreadPoolExecutor(max(number for number, _ in works)) as pool:
        for number, num_tokens in works:
            for _ in range(2):  # the second run is measured: the prompts are cached
                begun = time.monotonic()
                list(pool.map(ask, copying_prompts(number), [num_tokens] * number))
                rate = number * num_tokens / (time.monotonic() - begun)
            rates.append(rate)
    return rates


def _serve(path: Path, how: str) -> Any:
    """Returns a server."""
    import xllamacpp

    params, (look_up, _, length) = xllamacpp.CommonParams(), how.partition("-")
    params.model.path, params.n_parallel, params.n_ctx, params.kv_unified = str(path), 32, 32 * 512, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    params.n_batch, params.n_ubatch, params.verbosity = 2048, 512, -1
    if look_up != "off":
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{look_up.upper()}")]
    if length:
        options = getattr(params.speculative, look_up)
        setattr(options, "n_match" if look_up == "ngram_mod" else "size_n", int(length))
    return xllamacpp.Server(params)
