"""The engines that are compared: how each runs offline and as a server."""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from processes import MeasurementError, Server, run

GIB = 2**30
CACHE_GIB = 4
MAX_MODEL_LEN = 4096  # the checkpoints' own context lengths do not fit into every cache that is measured


BF16, Q8_0, Q4_0, Q4_K_M = "bf16", "q8_0", "q4_0", "q4_k_m"
"""Weights: those of the checkpoint, or of a GGUF file that is made of it."""


AUTO, INT8 = "auto", "int8"
"""KV caches: each engine's own default, or 8 bits."""


@dataclass(frozen=True)
class Batch:
    """`num` requests at once, of `input_len` tokens of prompt and `output_len` of output each."""

    num: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Setting:
    """The formats with which an engine computes."""

    weights: str = BF16
    kv_cache_dtype: str = AUTO


DEFAULTS = Setting()


class Engine(Protocol):
    """An engine that can be measured offline."""

    name: str
    serves: bool  # whether the engine is a `ServingEngine`
    settings: Collection[Setting]  # those that it can compute with

    def output_rate(self, model: Path, setting: Setting, batch: Batch) -> float:
        """Output tokens per second; the time includes the prefill."""


class GgufFiles:
    """GGUF files of checkpoints, each made once.

    Args:
        converter: to_gguf.py.
        work: folder of the files.
        environments: as in `gguf_engines`; llama.cpp's library is needed for Q4_K_M.

    Attributes:
        kinds: the weights of which it can make files, beside those in bfloat16.
    """

    def __init__(self, converter: Path, work: Path, limit_seconds: float, environments: Path) -> None:
        self._library = next(environments.glob("llama/lib/python*/site-packages/xllamacpp/*.so"), None)
        self.kinds = (Q8_0, Q4_0, Q4_K_M) if self._library else (Q8_0, Q4_0)
        self._converter = converter
        self._work = work
        self._limit_seconds = limit_seconds

    def file(self, model: Path, weights: str) -> Path:
        path = self._work / f"{model.name}-{weights}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            convert = [sys.executable, str(self._converter), str(model), str(partial), weights]
            if weights == Q4_K_M:
                script, plain = Path(__file__).parent / "k_quants.py", self.file(model, BF16)
                convert = [sys.executable, str(script), str(self._library), str(plain), str(partial)]
            run(convert, {}, self._limit_seconds, self._work / "to_gguf.log")
            partial.rename(path)
        return path


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
        files: for weights of few bits.
    """

    serves = True

    def __init__(
        self,
        work: Path,
        limit_seconds: float,
        *,
        name: str = "Quire",
        python: Path = Path(sys.executable),
        files: GgufFiles | None = None,
    ) -> None:
        self.name = name
        kinds = (BF16, *files.kinds) if files else (BF16,)
        self.settings = [Setting(weights, dtype) for weights in kinds for dtype in (AUTO, INT8)]
        self._files = files
        self._work = work
        self._limit_seconds = limit_seconds
        self._quire = [str(python), "-m", "quire"]

    def output_rate(self, model: Path, setting: Setting, batch: Batch) -> float:
        if self._files and setting.weights != BF16:
            model = self._files.file(model, setting.weights)
        out = self._work / "quire.json"
        command = [*self._quire, "bench", "throughput", "--model", str(model), "--device", "cpu", *_load(batch, out)]
        command += ["--kv-cache-memory-bytes", str(CACHE_GIB * GIB), "--kv-cache-dtype", setting.kv_cache_dtype]
        run(command, {}, self._limit_seconds, self._work / "quire.log")
        return _output_rate(self.name, json.loads(out.read_text()), batch)

    def server(
        self, model: Path, *, cache_gib: int = CACHE_GIB, max_model_len: int = MAX_MODEL_LEN, quick_start: bool = False
    ) -> Server:
        command = [*self._quire, "serve", str(model), "--device", "cpu"]
        command += ["--kv-cache-memory-bytes", str(cache_gib * GIB)]
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
    settings = (DEFAULTS,)

    def __init__(self, environment: Path, work: Path, limit_seconds: float) -> None:
        self._vllm = environment / "bin" / "vllm"
        self._work = work
        self._limit_seconds = limit_seconds

    def output_rate(self, model: Path, setting: Setting, batch: Batch) -> float:
        out = self._work / "vllm.json"
        command = [str(self._vllm), "bench", "throughput", "--model", str(model)]
        command += [*_load(batch, out), "--dataset-name", "random"]
        run(command, self.env(), self._limit_seconds, self._work / "vllm.log")
        return _output_rate(self.name, json.loads(out.read_text()), batch)

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


class GgufEngine:
    """An engine that reads GGUF files; offline only.

    Args:
        command: measures a batch of it, and prints JSON with `tok_s`.
        settings: those that `command` computes with.
        count_flags: flags of `command` that want the number of requests.
    """

    serves = False

    def __init__(
        self,
        name: str,
        command: Sequence[Path],
        files: GgufFiles,
        limit_seconds: float,
        *,
        settings: Collection[Setting],
        count_flags: Collection[str] = ("--num-prompts",),
    ) -> None:
        self.name = name
        self.settings = settings
        self._command = [str(part) for part in command]
        self._files = files
        self._limit_seconds = limit_seconds
        self._count_flags = count_flags

    def output_rate(self, model: Path, setting: Setting, batch: Batch) -> float:
        file = self._files.file(model, setting.weights)
        flags = dict.fromkeys(self._count_flags, batch.num)
        flags |= {"--input-len": batch.input_len, "--output-len": batch.output_len}
        command = [*self._command, str(file), "--runs=1", *(f"{flag}={value}" for flag, value in flags.items())]
        log = file.with_suffix(".log")
        output = run(command, {}, self._limit_seconds, log)
        rates = re.findall(r'^{.*"tok_s": ([\d.]+)}$', output, re.MULTILINE)
        if not rates:
            raise MeasurementError(f"{self.name} printed no rate; see {log}")
        return float(rates[-1])


def gguf_engines(environments: Path, scripts: Path, files: GgufFiles, limit_seconds: float) -> list[Engine]:
    """llama.cpp and OpenVINO GenAI.

    Args:
        environments: folder of their virtual environments, `llama` and `openvino`; an engine without one is left out.
        scripts: folder of llama_server.py and openvino_batch.py.
    """
    llama = environments / "llama" / "bin" / "python", scripts / "llama_server.py"
    openvino = environments / "openvino" / "bin" / "python", scripts / "openvino_batch.py"
    engines = {
        llama[0]: GgufEngine(
            "llama.cpp",
            llama,
            files,
            limit_seconds,
            settings=[Setting(weights) for weights in (BF16, *files.kinds)],
            count_flags=("--num-prompts", "--seqs"),
        ),
        openvino[0]: GgufEngine(
            "OpenVINO",
            openvino,
            files,
            limit_seconds,
            # Its default on CPUs (KV_CACHE_PRECISION) is 8 bits.
            settings=[Setting(weights, dtype) for weights in files.kinds for dtype in (AUTO, INT8)],
        ),
    }
    return [engine for python, engine in engines.items() if python.exists()]


def _output_rate(name: str, figures: dict, batch: Batch) -> float:
    """Output tokens per second, from the figures of `bench throughput` of Quire or vLLM."""
    # A few tokens of difference are allowed, because vLLM's random prompts do not all tokenize to the same length.
    tokens = batch.num * (batch.input_len + batch.output_len)
    if abs(figures["total_num_tokens"] - tokens) > batch.num * batch.input_len * 0.05 + batch.num:
        raise MeasurementError(f"{name} ran {figures['total_num_tokens']} tokens, not what was asked for.")
    return batch.num * batch.output_len / figures["elapsed_time"]


def _load(batch: Batch, out: Path) -> list[str]:
    """Flags that Quire and vLLM share."""
    flags = [
        "--num-prompts",
        batch.num,
        "--num-warmups",
        batch.num,
        "--random-input-len",
        batch.input_len,
        "--random-output-len",
        batch.output_len,
        "--output-json",
        out,
    ]
    flags += ["--max-model-len", MAX_MODEL_LEN]
    # Prompts are random. Pages that stay cached would be replaced by new memory; OpenVINO's script caches none, either.
    flags += ["--no-enable-prefix-caching"]
    return list(map(str, flags))
