"""`quire bench throughput`: offline tokens per second, with all requests submitted at once."""

import argparse
import time

from quire.core.config.engine_args import EngineArgs
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.bench.adapters import Adapters, add_adapter_arguments, chosen_adapters
from quire.frontend.bench.datasets.choice import add_dataset_arguments, check_text_only, make_requests
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary
from quire.frontend.bench.figures import print_table, write_json
from quire.frontend.bench.profile import add_profile_argument, check_profiler, engine_recording
from quire.frontend.checkpoint.model_source import find_model, find_tokenizer
from quire.frontend.flags.parser import CommandParser, add_engine_options
from quire.frontend.flags.ranges import COUNT, COUNT_OR_NONE
from quire.frontend.llm import LLM
from quire.frontend.outputs import RequestOutput
from quire.frontend.text.tokenizer import Tokenizer


def add_arguments(parser: CommandParser) -> None:
    """Adds vLLM's flags for text generation, and all engine options."""
    add_engine_options(parser)
    add_dataset_arguments(parser)
    group = parser.add_argument_group("throughput")
    group.add_argument("--n", type=COUNT, default=1, help="Completions per prompt (default: 1).")
    group.add_argument("--num-warmups", type=COUNT_OR_NONE, default=0, help="Requests run before the measurement.")
    group.add_argument("--disable-detokenize", action="store_true", help="Leave output ids as they are.")
    add_adapter_arguments(group)
    group.add_argument("--output-json", help="File for the figures.")
    add_profile_argument(group, "the measured run")


def run(args: argparse.Namespace) -> int:
    """Measures once. Returns the exit code."""
    if args.profile:
        check_profiler(args.engine_args)
    with LLM(**args.engine_args.flat()) as llm:
        adapters = chosen_adapters(args.lora_path, args.lora_assignment, args.engine_args, llm.config.seed)
        requests = make_requests(args, _vocabulary(llm, args.engine_args), llm.config.seed, as_text=False)
        check_text_only(requests, "quire bench throughput")
        if args.num_warmups:
            _generate(llm, requests[: args.num_warmups], adapters, args)
            llm.reset_prefix_cache()
        with engine_recording(llm, args.profile):
            started = time.perf_counter()
            outputs = _generate(llm, requests, adapters, args)
            elapsed = time.perf_counter() - started
    input_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": input_tokens + output_tokens,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (input_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }
    rows = [
        ("Requests", f"{len(requests)}"),
        ("Input tokens", f"{input_tokens}"),
        ("Output tokens", f"{output_tokens}"),
        ("Duration (s)", f"{elapsed:.2f}"),
        ("Requests per second", f"{figures['requests_per_second']:.2f}"),
        ("Total tokens per second", f"{figures['tokens_per_second']:.2f}"),
        ("Output tokens per second", f"{figures['output_tokens_per_second']:.2f}"),
    ]
    print_table("Offline throughput", rows)
    write_json(args.output_json, figures)
    return 0


def _generate(
    llm: LLM, requests: list[BenchRequest], adapters: Adapters, args: argparse.Namespace
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            n=args.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=not args.disable_detokenize,
        )
        for request in requests
    ]
    prompts = [request.prompt_token_ids for request in requests]
    return llm.generate(prompts, params, lora_request=adapters(len(requests)))


def _vocabulary(llm: LLM, args: EngineArgs) -> Vocabulary:
    size = llm.config.spec.vocab_size
    if args.model.skip_tokenizer_init:
        return Vocabulary(size)
    folder = find_tokenizer(args.model, args.load, find_model(args.model, args.load))
    return Vocabulary(size, Tokenizer.from_folder(folder, args.model.tokenizer_mode, args.model.trust_remote_code))
