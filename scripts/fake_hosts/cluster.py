"""Hosts that serve one model in a layout, seen from another one that has none of it."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fake_hosts.host import SECRET, Host
from fake_hosts.switch import Port, Switch

DEMO_MODEL = Path(__file__).parents[2] / "quire" / "demo_model"
DATA = "--data-parallel-size"
PROMPTS = ("Once upon a time", "The capital of France is", "def add(a, b):")


@dataclass(frozen=True)
class Layout:
    """How a model is divided over hosts.

    Attributes:
        options: of `quire serve` on all of them.
        has_engines: each host has a whole engine, and not some workers of one.
        is_mixture: the model has experts.
        overrides: of the model's settings, as `--hf-overrides` takes them.
    """

    options: tuple[str, ...] = ()
    num_hosts: int = 2
    has_engines: bool = False
    is_mixture: bool = False
    overrides: str = ""

    @property
    def on_one_host(self) -> "Layout":
        """The same model, undivided."""
        return Layout(num_hosts=1, is_mixture=self.is_mixture, overrides=self.overrides)

    @property
    def waits_for_hosts(self) -> bool:
        """True if a step waits for another host."""
        return not self.has_engines or "--enable-expert-parallel" in self.options

    @property
    def num_engines(self) -> int:
        """Engines behind node 0's server."""
        if self.has_engines:
            return self.num_hosts
        return int(self.options[self.options.index(DATA) + 1]) if DATA in self.options else 1


LAYOUTS = {
    "TP 2": Layout(("--tensor-parallel-size", "2")),
    "PP 2": Layout(("--pipeline-parallel-size", "2")),
    "TP 2 with experts": Layout(("--tensor-parallel-size", "2"), is_mixture=True),
    "EP 2": Layout(("--tensor-parallel-size", "2", "--enable-expert-parallel"), is_mixture=True),
    "DP 2": Layout(has_engines=True),
    "PP 2 x TP 2": Layout(("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"), num_hosts=4),
    "DP 4": Layout(has_engines=True, num_hosts=4),
    "DP 2 of TP 2": Layout((DATA, "2", "--tensor-parallel-size", "2"), num_hosts=4),
    "PCP 2": Layout(("--prefill-context-parallel-size", "2")),
    "TP 2 with DCP 2": Layout(  # of a model with one KV head
        ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"),
        is_mixture=True,
        overrides='{"num_key_value_heads": 1}',
    ),
    "DP 2 x EP 2": Layout(("--enable-expert-parallel",), has_engines=True, is_mixture=True),
    "DP 4 x EP 4": Layout(("--enable-expert-parallel",), num_hosts=4, has_engines=True, is_mixture=True),
}


def make_mixture(folder: Path) -> Path:
    """Makes a checkpoint with the demo model's tokenizer, a small mixture's settings and random weights."""
    folder.mkdir()
    for path in DEMO_MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path)
    settings = json.loads((DEMO_MODEL / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


class Cluster:
    """The first hosts of `hosts`, as many as the layout has; the first is node 0.

    Args:
        observer: the port through which requests come.
        mixture: the checkpoint of layouts with experts.
    """

    def __init__(self, layout: Layout, switch: Switch, hosts: list[Host], observer: Port, mixture: Path) -> None:
        self.switch = switch
        self.hosts = hosts[: layout.num_hosts]
        self._layout = layout
        self.num_engines = layout.num_engines
        self._observer = observer
        self._model = [str(mixture), "--load-format", "dummy"] if layout.is_mixture else [str(DEMO_MODEL)]
        if layout.overrides:
            self._model += ["--hf-overrides", layout.overrides]
        self._name = "mixture" if layout.is_mixture else "quire-demo"
        size, head = str(layout.num_hosts), hosts[0].address
        if layout.has_engines:
            self._where = [DATA, size, "--data-parallel-size-local", "1", "--master-addr", head]
        elif layout.num_hosts > 1:
            self._where = ["--nnodes", size, DATA, str(layout.num_engines), "--master-addr", head]
        else:
            self._where = []

    def start(self) -> None:
        """Starts all hosts, and returns when they serve."""
        for number in range(1, len(self.hosts)):
            self.start_node(number)
        self.start_head()
        self.wait_until_ready()

    def start_head(self) -> None:
        """Starts node 0."""
        head = self.hosts[0]
        # In float32, where no order of additions makes another token the likeliest.
        numbers = ["--dtype", "float32", "--max-model-len", "2k", "--served-model-name", self._name]
        head.start(*self._model, "--host", head.address, *numbers, *self._layout.options, *self._where)

    def start_node(self, number: int, secret: str = SECRET) -> None:
        """Starts another node."""
        flag = "--data-parallel-start-rank" if self._layout.has_engines else "--node-rank"
        self.hosts[number].start(*self._model, "--headless", flag, str(number), *self._where, secret=secret)

    def wait_until_ready(self) -> None:
        """Returns when every engine serves."""
        self.wait(lambda: set(self.states()) == {"serving"})

    def wait(self, condition: Callable[[], bool], seconds: float = 180) -> float:
        """Seconds until the condition is met."""
        started = time.monotonic()
        while not condition():
            # A host that was killed on purpose has ended by a signal.
            has_failed = any(host.process is not None and (host.process.poll() or 0) > 0 for host in self.hosts)
            if has_failed or time.monotonic() - started > seconds:
                logs = "\n".join(host.log()[-3000:] for host in self.hosts)
                raise SystemExit(f"it did not start, or not in time:\n{logs}")
            time.sleep(0.02)
        return time.monotonic() - started

    def states(self) -> list[str]:
        """The states of all engines; empty if node 0 does not answer."""
        try:
            health = httpx.get(f"{self._url}/health", timeout=5).json()
            return [each["state"] for each in health.get("engines") or [health["engine"]]]
        except (httpx.HTTPError, KeyError):
            return []

    def texts(self) -> list[str]:
        """Answers whose tokens are those of any layout."""
        return ["".join(self.stream(prompt, 60, seed)) for seed, prompt in enumerate(PROMPTS)]

    def stream(self, prompt: str, max_tokens: int, seed: int = 0) -> Iterator[str]:
        """The texts of an answer's parts."""
        return (part["text"] for part in self._parts(prompt, max_tokens, seed))

    def token_counts(self, prompt: str, max_tokens: int, engine: int = -1) -> Iterator[int]:
        """How many tokens of an engine have come, after each part of an answer: tokens may travel together."""
        return itertools.accumulate(len(part["token_ids"] or ()) for part in self._parts(prompt, max_tokens, 0, engine))

    def _parts(self, prompt: str, max_tokens: int, seed: int, engine: int = -1) -> Iterator[dict[str, Any]]:
        """The chunks of an answer from one engine; the last engine if none is named and there are several."""
        body = {
            "model": self._name, "prompt": prompt, "max_tokens": max_tokens, "seed": seed, "stream": True,
            "temperature": 0.8 if seed else 0.0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"X-data-parallel-rank": str(engine % self.num_engines)} if self.num_engines > 1 else {}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers, timeout=180) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])["choices"][0]

    def sent(self) -> tuple[int, int]:
        """Bytes and frames that hosts have sent each other. Each is counted at both ends, or at the observer's."""
        ports, observer = [host.port for host in self.hosts], self._observer
        num_bytes = sum(port.num_bytes for port in ports) - observer.num_bytes
        num_frames = sum(port.num_frames for port in ports) - observer.num_frames
        return num_bytes // 2, num_frames // 2

    def end(self) -> None:
        """Ends all hosts' processes."""
        for host in self.hosts:
            host.end()

    @property
    def _url(self) -> str:
        return f"http://{self.hosts[0].address}:8000"
