"""The engines that are compared: how each runs offline and as a server."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from processes import MeasurementError, Server, run

GIB = 2**30
CACHE_GIB = 4
MAX_MODEL_LEN = 4096  # the checkpoints' own context lengths do not fit into every cache that is measured


class Engine(Protocol):
    """An engine that can be measured offline."""

    name: str
    serves: bool  # whether the engine is a `ServingEngine`

    def output_rate(self, model: Path, num: int, input_len: int, output_len: int) -> float:
        """Output tokens per second of `num` requests at once; the time includes the prefill."""


class ServingEngine(Engine, Protocol):
    """An engine that can be measured over HTTP, too."""

    def server(
        self, model: Path, *, cache_gib: int = CACHE_GIB, max_model_len: int = MAX_MODEL_LEN, quick_start: bool = False
    ) -> Server:
        """A server, which starts when its context is entered.

        Args:
            cache_gib: memory of the KV cache, in GiB.
            max_model_len: most tokens of prompt and output together.
            quick_start: disable optimizations that make start-up slower.
        """

    def memory_beyond(self, model: Path, weights_bytes: int) -> int:
        """Resident bytes of a server's processes after an answer, without weights and cache."""


class Quire:
    """This tree's Quire, or the Quire of another virtual environment.

    Args:
        python: the environment's Python.
    """

    serves = True

    def __init__(
        self, work: Path, limit_seconds: float, *, name: str = "Quire", python: Path = Path(sys.executable)
    ) -> None:
        self.name = name
        self._work = work
        self._limit_seconds = limit_seconds
        self._quire = [str(python), "-m", "quire"]

    def output_rate(self, model: Path, num: int, input_len: int, output_len: int) -> float:
        out = self._work / "quire.json"
        command = [*self._quire, "bench", "throughput", "--model", str(model), *_load(num, input_len, output_len, out)]
        command += ["--kv-cache-memory-bytes", str(CACHE_GIB * GIB)]
        run(command, {}, self._limit_seconds, self._work / "quire.log")
        figures = json.loads(out.read_text())
        return _output_rate(self.name, figures, num, input_len, output_len)

    def server(
        self, model: Path, *, cache_gib: int = CACHE_GIB, max_model_len: int = MAX_MODEL_LEN, quick_start: bool = False
    ) -> Server:
        command = [*self._quire, "serve", str(model), "--kv-cache-memory-bytes", str(cache_gib * GIB)]
        command += ["--max-model-len", str(max_model_len)]
        return Server(command, {}, self._limit_seconds, self._work / "quire.log")

    def memory_beyond(self, model: Path, weights_bytes: int) -> int:
        with self.server(model) as server:
            server.complete(8)
            return server.resident_memory().beyond(weights_bytes)


class Vllm:
    """Args: environment: folder of a virtual environment with vLLM."""

    name = "vLLM"
    serves = True

    def __init__(self, environment: Path, work: Path, limit_seconds: float) -> None:
        self._vllm = environment / "bin" / "vllm"
        self._work = work
        self._limit_seconds = limit_seconds

    def output_rate(self, model: Path, num: int, input_len: int, output_len: int) -> float:
        out = self._work / "vllm.json"
        command = [str(self._vllm), "bench", "throughput", "--model", str(model)]
        command += [*_load(num, input_len, output_len, out), "--dataset-name", "random"]
        run(command, self.env(), self._limit_seconds, self._work / "vllm.log")
        return _output_rate(self.name, json.loads(out.read_text()), num, input_len, output_len)

    def server(
        self, model: Path, *, cache_gib: int = CACHE_GIB, max_model_len: int = MAX_MODEL_LEN, quick_start: bool = False
    ) -> Server:
        command = [str(self._vllm), "serve", str(model), "--max-model-len", str(max_model_len)]
        command += ["--enable-prefix-caching"]  # as Quire does by default
        command += ["--enforce-eager"] if quick_start else []
        return Server(command, self.env(cache_gib), self._limit_seconds, self._work / "vllm.log")

    def memory_beyond(self, model: Path, weights_bytes: int) -> int:
        """Extrapolates from two cache sizes to none, because vLLM's cache cannot be distinguished from other memory.

        All of vLLM's cache is resident.
        """
        totals = []
        for cache_gib in (1, 2):
            with self.server(model, cache_gib=cache_gib) as server:
                server.complete(8)
                totals.append(server.resident_memory().total)
        return 2 * totals[0] - totals[1] - weights_bytes

    def load(self, server: Server, model: Path, flags: list[str]) -> dict:
        """Puts load on any server with vLLM's client, and returns the client's figures."""
        out = self._work / "load.json"
        out.unlink(missing_ok=True)
        command = [str(self._vllm), "bench", "serve", "--backend", "openai", "--base-url", server.base_url]
        command += ["--model", str(model), "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el"]
        command += ["--save-result", "--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name]
        run([*command, *flags], self.env(), self._limit_seconds, self._work / "load.log")
        figures = json.loads(out.read_text())
        if figures.get("failed") or not figures["completed"]:
            raise MeasurementError(f"requests failed; see {self._work / 'load.log'}")
        return figures

    def env(self, cache_gib: int = CACHE_GIB) -> Mapping[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class LlamaCpp:
    """Offline only.

    Args:
        environment: folder of a virtual environment with llama-cpp-python and gguf.
        scripts: folder of to_gguf.py and llama_batched.py.
    """

    name = "llama.cpp"
    serves = False

    def __init__(self, environment: Path, scripts: Path, work: Path, limit_seconds: float) -> None:
        self._python = environment / "bin" / "python"
        self._scripts = scripts
        self._work = work
        self._limit_seconds = limit_seconds

    def output_rate(self, model: Path, num: int, input_len: int, output_len: int) -> float:
        weights = self._work / f"{model.name}.gguf"
        log = self._work / "llama.cpp.log"
        if not weights.exists():
            partial = weights.with_suffix(".partial")
            convert = [str(self._python), str(self._scripts / "to_gguf.py"), str(model), str(partial)]
            run(convert, {}, self._limit_seconds, log)
            partial.rename(weights)
        sizes = map(str, (num, input_len, output_len))
        command = [str(self._python), str(self._scripts / "llama_batched.py"), str(weights), *sizes]
        output = run(command, {}, self._limit_seconds, log)
        found = re.search(r"output ([\d.]+) tok/s", output)
        if found is None:
            raise MeasurementError(f"llama_batched.py printed no rate; see {log}")
        return float(found.group(1))


def _output_rate(name: str, figures: dict, num: int, input_len: int, output_len: int) -> float:
    """Output tokens per second, from the figures of `bench throughput` of Quire or vLLM."""
    # A few tokens of difference are allowed, because vLLM's random prompts do not all tokenize to the same length.
    if abs(figures["total_num_tokens"] - num * (input_len + output_len)) > num * input_len * 0.05 + num:
        raise MeasurementError(f"{name} ran {figures['total_num_tokens']} tokens, not what was asked for.")
    return num * output_len / figures["elapsed_time"]


def _load(num: int, input_len: int, output_len: int, out: Path) -> list[str]:
    """Flags that Quire and vLLM share."""
    flags = [
        "--num-prompts",
        num,
        "--random-input-len",
        input_len,
        "--random-output-len",
        output_len,
        "--output-json",
        out,
    ]
    flags += ["--max-model-len", MAX_MODEL_LEN]
    return list(map(str, flags))
