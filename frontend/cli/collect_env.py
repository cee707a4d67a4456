"""`quire collect-env`: facts about this machine for a bug report, with secrets masked."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil

import quire
from quire.core.errors import ConfigError
from quire.frontend.flags.parser import CommandParser

PROBE_TIMEOUT_S = 60.0
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
ENVIRONMENT = re.compile(r"(QUIRE|VLLM|HF|HUGGING_FACE|CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|KMP|TOKENIZERS)_")
CPU_FEATURES = re.compile(r"avx|amx|fma|f16c|sse4_2|asimd|sve|bf16|i8mm|neon|vsx")

# A process of its own describes the torch build: a broken install cannot end this one, which never loads torch.
TORCH_PROBE = """
import json, torch
facts = {"version": torch.__version__, "CUDA build": torch.version.cuda, "threads": torch.get_num_threads(),
         "CPU kernels": torch.backends.cpu.get_cpu_capability(), "oneDNN": torch.backends.mkldnn.is_available()}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        facts[f"GPU {i}"] = f"{device.name}, {device.total_memory / 2**30:.1f} GiB, sm_{device.major}{device.minor}"
else:
    facts["GPU"] = None
print(json.dumps(facts))
"""


def add_arguments(parser: CommandParser) -> None:
    """Takes no options."""


def run(args: argparse.Namespace) -> None:
    for title, facts in sections():
        print(f"{title}\n" + "\n".join(f"  {name:<24} {value}" for name, value in facts) + "\n")


Facts = list[tuple[str, object]]


def sections() -> Iterable[tuple[str, Facts]]:
    """(title, facts) of each part, the slow one last."""
    yield "System", _system()
    yield "Processor and memory", _hardware()
    yield "Packages", _packages()
    yield "Environment", environment(os.environ) or [("(nothing set)", "")]
    yield "Torch", _torch()


def read_facts(path: Path) -> dict[str, str]:
    """The facts in an output of this command. Raises ConfigError."""
    try:
        rows = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    found = {}
    for row in rows:
        if row.startswith("  "):
            name, value = (row[2:26], row[27:]) if row[26:27] in ("", " ") else row[2:].partition(" ")[::2]
            found[name.strip()] = value.strip()
    if "quire" not in found:
        raise ConfigError(f"{path} is neither a file of a flight recorder nor an output of `quire collect-env`.")
    return found


def _system() -> Facts:
    release = {}
    if Path("/etc/os-release").exists():
        release = platform.freedesktop_os_release()
    return [
        ("quire", quire.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", release.get("PRETTY_NAME", platform.system())),
        ("kernel", platform.release()),
        ("libc", " ".join(platform.libc_ver())),
    ]


def _hardware() -> Facts:
    memory = psutil.virtual_memory()
    model, features = read_cpu(Path("/proc/cpuinfo"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: Facts = [
        ("processor", f"{model or platform.processor()} ({platform.machine()})"),
        ("cores", f"{psutil.cpu_count(logical=False)} physical, {os.cpu_count()} logical, {usable} usable"),
        ("features", " ".join(features) or "unknown"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
        ("/dev/shm", _free("/dev/shm")),
    ]
    for name, path in (("cgroup cpu.max", "cpu.max"), ("cgroup memory.max", "memory.max")):
        file = Path("/sys/fs/cgroup", path)
        if file.is_file():
            facts.append((name, file.read_text().strip()))
    return facts


def _free(folder: str) -> str:
    if not Path(folder).is_dir():
        return "absent"
    usage = shutil.disk_usage(folder)
    return f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"


def read_cpu(cpuinfo: Path) -> tuple[str, list[str]]:
    """(model name, instruction sets that matter for kernels) from Linux's cpuinfo; empty elsewhere."""
    if not cpuinfo.exists():
        return "", []
    rows = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE))
    flags = (rows.get("flags") or rows.get("Features") or "").split()
    return rows.get("model name", ""), sorted(flag for flag in flags if CPU_FEATURES.search(flag))


def _packages() -> Facts:
    """Versions of everything that Quire depends on."""
    names = sorted({re.split(r"[^A-Za-z0-9_.-]", row)[0] for row in requires("quire") or [] if "extra ==" not in row})
    return [(name, _version(name)) for name in names]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def environment(variables: Mapping[str, str]) -> Facts:
    """The environment variables that matter to Quire, with the values of secret-looking ones masked."""
    return [
        (name, "(set, not shown)" if SECRET.search(name) and value else value)
        for name, value in sorted(variables.items())
        if ENVIRONMENT.match(name)
    ]


def _torch() -> Facts:
    try:
        probe = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [("torch", f"did not import within {PROBE_TIMEOUT_S:.0f} s")]
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return [("torch", f"does not import: {last}")]
    return [(name, "none" if value is None else value) for name, value in json.loads(probe.stdout).items()]
