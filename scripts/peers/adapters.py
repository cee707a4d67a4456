"""What adapters cost: tokens a second of the base, and of 1 and 16 adapters of rank 16 on all linear layers, in turns.

Without a model, a random one of the shape of Qwen3 0.6B is served:
    python scripts/peers/adapters.py [MODEL] [--engines base adapters:1 adapters:16] [--rounds 3]
    python scripts/peers/adapters.py [MODEL] --engines host:16 host:1000
Each engine runs in a process of its own: 32 requests of 128 tokens that generate 64, and one stream of 96 tokens.

`host:N` has 16 slots and N adapters in the host's memory, of rank 16 on the queries and values of every fourth layer:
1000 are 1.1 GB. All of them are loaded before; then 128 requests, 16 at once, go over all in turns. The prediction: a
request's adapter is copied to a slot while others decode, 1.1 MB in 64 steps: 0.95 x or more.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import turns  # beside this file

MANY, ONE = "32 x 128/64, tokens/s", "one stream, tokens/s"
OVER_ALL, BYTES, GREW = "16 at once over all, tokens/s", "adapters, MB", "memory of the engine for them, MB"
SLOTS = 16
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 151645, "hidden_act": "silu",
}  # fmt: skip
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="Folder of a checkpoint of the Llama family or Qwen.")
    turns.add_options(parser)
    parser.set_defaults(engines=["base", "adapters:1", "adapters:16"])
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measure(args.measure, args.model)))
        return
    command = [__file__, *([] if args.model is None else [str(args.model)])]
    print(_table(turns.run(args, command)))


def _table(found: dict[str, list[dict[str, float]]]) -> str:
    """Returns medians over the rounds, and their ratios to the first engine's in the same round."""
    base = next(iter(found.values()))
    if OVER_ALL in base[0]:
        rows = [f"| | {OVER_ALL} | x | {BYTES} | {GREW} |", "|---|---|---|---|---|"]
        for name, runs in found.items():
            ratio = statistics.median(run[OVER_ALL] / other[OVER_ALL] for run, other in zip(runs, base, strict=True))
            rate, size, grew = (statistics.median(run[key] for run in runs) for key in (OVER_ALL, BYTES, GREW))
            rows.append(f"| {name} | {rate:.1f} | {ratio:.3f} | {size:.0f} | {grew:.0f} |")
        return "\n".join(rows)
    rows = [f"| | {MANY} | x | {ONE} | x |", "|---|---|---|---|---|"]
    for name, runs in found.items():
        cells = []
        for work in (MANY, ONE):
            ratio = statistics.median(run[work] / other[work] for run, other in zip(runs, base, strict=True))
            cells += [f"{statistics.median(run[work] for run in runs):.1f}", f"{ratio:.3f}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _measure(name: str, model: Path | None) -> dict[str, float]:
    from quire import LLM, SamplingParams
    from quire.lora.request import LoRARequest

    kind, _, number = name.partition(":")
    count = int(number or 0)
    if kind == "host":
        return _measure_host(count, model)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 32}
        if model is None:
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHAPE))
            options["load_format"] = "dummy"
        if count:
            options |= {"enable_lora": True, "max_loras": count, "max_lora_rank": RANK}
        config = json.loads((model / "config.json").read_text())
        adapters: list[Any] = [
            LoRARequest(str(number), number, str(_make_adapter(Path(folder) / str(number), config, number)))
            for number in range(1, count + 1)
        ]
        with LLM(str(model), **options) as llm:

            def run(num_requests: int, num_tokens: int, start: int) -> float:
                prompts: list[Any] = [
                    {"prompt_token_ids": [(97 * index + 31 * i + start) % 1000 + 10 for i in range(128)]}
                    for index in range(num_requests)
                ]
                used = [adapters[index % count] if count else None for index in range(num_requests)]
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False, lora_request=used)
                return num_requests * num_tokens / (time.perf_counter() - started)

            run(32, 8, 0)
            run(1, 8, 1)
            return {MANY: max(run(32, 64, 2 + i) for i in range(2)), ONE: max(run(1, 96, 9 + i) for i in range(2))}


def _measure_host(count: int, model: Path | None) -> dict[str, float]:
    from quire import LLM, SamplingParams
    from quire.lora.request import LoRARequest

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": SLOTS}
        if model is None:
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHAPE))
            options["load_format"] = "dummy"
        options |= {"enable_lora": True, "max_loras": SLOTS, "max_cpu_loras": count, "max_lora_rank": RANK}
        config = json.loads((model / "config.json").read_text())
        adapters: list[Any] = []
        for number in range(1, count + 1):
            path = _make_adapter(Path(folder) / str(number), config, number, every=4, only=("q_proj", "v_proj"))
            adapters.append(LoRARequest(str(number), number, str(path)))
        with LLM(str(model), **options) as llm:

            def run(used: list[Any], num_tokens: int, start: int) -> float:
                prompts: list[Any] = [
                    {"prompt_token_ids": [(97 * index + 31 * i + start) % 1000 + 10 for i in range(128)]}
                    for index in range(len(used))
                ]
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False, lora_request=used)
                return len(used) * num_tokens / (time.perf_counter() - started)

            run(adapters[:SLOTS], 8, 0)
            before = _memory_of_children()
            for adapter in adapters:
                llm.llm_engine.add_lora(adapter)
            grew = _memory_of_children() - before
            stride = max(1, count // 128)
            used = [adapters[index * stride % count] for index in range(128)]
            size = sum(path.stat().st_size for path in Path(folder).glob("*/adapter_model.safetensors"))
            return {OVER_ALL: run(used, 64, 1), BYTES: size / 1e6, GREW: grew / 1e6}


def _memory_of_children() -> int:
    """Bytes that the engine's processes hold."""
    import psutil

    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def _make_adapter(
    folder: Path, config: dict[str, Any], seed: int, every: int = 1, only: tuple[str, ...] = ("proj",)
) -> Path:
    """Writes a random adapter, as PEFT does: of all linear layers, or of those with some ends in some layers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    tensors = {}
    for layer in range(0, config["num_hidden_layers"], every):
        for name, (inputs, outputs) in sizes.items():
            if not name.endswith(only):
                continue
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(RANK, inputs) / inputs**0.5).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, RANK) / 100).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


if __name__ == "__main__":
    main()
