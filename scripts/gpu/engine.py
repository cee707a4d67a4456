"""Output tokens a second of a whole engine with random weights, beside the floor of a decode step's bytes."""

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from part_results import Results
from shapes import decode_bytes, write_shape

from quire import LLM, SamplingParams


def main() -> None:
    """Starts one engine and measures batches of each size, after one unmeasured batch of that size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--profile", action="store_true", help="Report the time of each kernel in decode steps, too.")
    args = parser.parse_args()
    results = Results.of_part()
    bytes_per_s = next((row["ceilings"]["copy_gb_s"] * 1e9 for row in results.read() if "ceilings" in row), 3.03e12)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="quire-gpu-") as folder,
        LLM(
            str(write_shape(args.shape, Path(folder))),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            max_model_len=2 * (args.input_len + args.output_len),
            max_num_seqs=max(args.requests),
            enforce_eager=args.enforce_eager,
            profiler_config={"profiler": "torch", "torch_profiler_dir": folder} if args.profile else None,
            enable_prefix_caching=False,
        ) as llm,
    ):
        ready = time.monotonic() - began
        generator = np.random.default_rng(0)

        def seconds(num: int, output_len: int) -> float:
            params = SamplingParams(
                temperature=args.temperature, seed=0, ignore_eos=True, max_tokens=output_len, detokenize=False
            )
            prompts = generator.integers(0, 150_000, (num, args.input_len)).tolist()
            start = time.monotonic()
            llm.generate(prompts, params, use_tqdm=False)
            return time.monotonic() - start

        seconds(1, 1)
        results.add(start=args.shape, ready_s=round(ready, 2), first_answer_s=_since(began))
        for num in args.requests:
            for _ in range(2):  # the second batch meets recorded steps
                seconds(num, args.output_len)
            # The time of prompts is that of an output of one token; the rest are decode steps.
            whole = min(seconds(num, args.output_len) for _ in range(2))
            prompts = min(seconds(num, 1) for _ in range(2))
            step = (whole - prompts) / (args.output_len - 1)
            context = num * (args.input_len + args.output_len // 2)
            floor = decode_bytes(args.shape, context) / bytes_per_s
            results.add(
                engine=f"{args.shape}{', eager' if args.enforce_eager else ''}",
                case=f"{num} requests, {args.input_len}/{args.output_len}, temperature {args.temperature:g}",
                tokens_per_s=num * args.output_len / whole,
                decode_tokens_per_s=num / step,
                prompt_tokens_per_s=num * args.input_len / prompts,
                step_ms=step * 1e3,
                floor_ms=floor * 1e3,
            )
            if args.profile:
                llm.start_profile()
                seconds(num, 16)
                llm.stop_profile()
                [trace] = Path(folder).glob("*.json*")
                results.add(profile=args.shape, requests=num, kernels=kernel_times(trace))
                trace.unlink()


def kernel_times(trace: Path) -> dict[str, list[float]]:
    """Returns [launches, µs of all] of each kernel in a trace of torch's profiler, the longest first."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    times: dict[str, list[float]] = {}
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            count_and_time = times.setdefault(event["name"][:60], [0, 0.0])
            count_and_time[0] += 1
            count_and_time[1] += event["dur"]
    longest = sorted(times.items(), key=lambda each: -each[1][1])[:16]
    return {name: [count, round(micros, 1)] for name, (count, micros) in longest}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


if __name__ == "__main__":
    main()
