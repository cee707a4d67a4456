r"""What drafts bring: tokens a second with and without them, in turns.

    python scripts/peers/drafts.py [--engines off oracle liar] [--rounds 3]
    python scripts/peers/drafts.py --engines copy:off copy:ngram copy:suffix \
        --peers llama:off llama:ngram_simple llama:ngram_mod --peer-python LLAMA/bin/python
    python scripts/peers/drafts.py --engines schema:off schema:forced
    python scripts/peers/drafts.py --engines int4:off int4:oracle

Each engine runs in a process of its own, and is compared with the first of the list.

- `off`, `oracle` and `liar` serve a random model of the shape of Qwen3 0.6B in bfloat16, `int4:...` with 4 bits: one
  stream of 96 tokens, and 32 streams of 64. The oracle proposes 4 drafts, each right with probability 0.8; the liar
  four wrong ones.
- `copy:...` serve the same shape with weights that are made to copy: layers add nothing, and each token's successor is
  a permutation of the vocabulary. The prompt is 256 tokens of one of its cycles, and the answer goes on with it.
- `llama:...` serve the weights of `copy:...` with llama.cpp's own server and one of its look-ups (`ngram_simple`,
  `ngram_map_k`, `ngram_map_k4v`, `ngram_mod`, `ngram_cache`; `off`). It begins with 12 equal tokens (`ngram_mod`: 24),
  unless the name ends in another number: `llama:ngram_simple-5`. They need an environment with xllamacpp, gguf, torch
  and safetensors, and are left out without one.
- `schema:...` serve the demo model with a schema of 40 keys, without white space of the model's choice: one stream
  and 8.

Predictions, for a CPU on which weights bound a decode:
- oracle, one stream: four drafts at 0.8 bring 3.36 tokens a step, in about 1.15 times its time: 2.9 x; at 4 bits, where
  products take a greater share, 1.5 times: 2.2 x. The first ten tokens are measured without drafts: 2.6 x and 2.0 x.
- oracle, 32 streams: rows share the weights already, so a draft costs nearly a row: 1.0 to 1.2 x.
- liar: 0.99 x for one stream (a few wrong drafts at the beginning), 0.985 x or more for 32.
- copy, one stream: 9 tokens a step (ngram) or 16 (suffix) in 1.3 and 1.5 times its time: 5 x or more.
- copy, llama.cpp: 12 tokens stand twice after 7 of the answer. Then each step checks 48 drafts, in 3 to 4 times its
  time: 4 x at most, so `copy:ngram` is ahead by the length of that beginning.
- schema: keys and quotes are two thirds of the tokens, and come six a step: 2 x or more.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_drafts  # beside this file
import turns
from adapters import SHAPE
from copying import copying_prompts, copying_weights

ONE, MANY = "one stream, tokens/s", "many streams, tokens/s"
OUTPUTS = "DRAFTS_OUTPUTS"
SCHEMA = {
    "type": "object",
    "properties": {f"measured_value_{number}": {"type": "boolean"} for number in range(40)},
    "required": [f"measured_value_{number}" for number in range(40)],
    "additionalProperties": False,
}


class Oracle:
    """A class of drafts: knows each prompt's output."""

    share = 0.8  # of right drafts

    def __init__(self, config: Any) -> None:
        self._known = [(prompt, output) for prompt, output in json.loads(Path(os.environ[OUTPUTS]).read_text())]
        self._rng = random.Random(0)

    def propose(self, token_ids: list[list[int]], most: int) -> list[list[int]]:
        """Up to `most` drafts for each request."""
        return [self._drafts(known, most) for known in token_ids]

    def _drafts(self, known: list[int], most: int) -> list[int]:
        for prompt, output in self._known:
            if known[: len(prompt)] == prompt:
                following = output[len(known) - len(prompt) :][:most]
                return [token if self._rng.random() < self.share else token + 1 for token in following]
        return []


class Liar(Oracle):
    """Is never right."""

    share = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_options(parser)
    parser.set_defaults(engines=["off", "oracle", "liar"])
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measure(args.measure)))
        return
    if not args.peers:
        print("llama.cpp is not measured: name its engines by --peers, and a Python with xllamacpp by --peer-python.")
    elif subprocess.run([args.peer_python, "-c", "import gguf, torch, xllamacpp"], capture_output=True).returncode:
        print(f"llama.cpp is not measured: {args.peer_python} has no xllamacpp, gguf and torch; install them there.")
        args.peers = []
    found = turns.run(args, [__file__])
    base = next(iter(found.values()))
    print(f"| | {ONE} | x | {MANY} | x |\n|---|---|---|---|---|")
    for name, runs in found.items():
        cells = []
        for work in (ONE, MANY):
            ratio = statistics.median(run[work] / other[work] for run, other in zip(runs, base, strict=True))
            cells += [f"{statistics.median(run[work] for run in runs):.1f}", f"{ratio:.3f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def _measure(name: str) -> dict[str, float]:
    work, _, how = name.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        if work == "schema":
            return _run_schema(how)
        if work == "llama":
            shape = SHAPE | {"tie_word_embeddings": False}
            rates = llama_drafts.measure(Path(folder) / "model.gguf", shape, how, [(1, 96), (32, 64)])
            return dict(zip((ONE, MANY), rates, strict=True))
        options = _model(Path(folder), work)
        works = {ONE: (_prompts(1, work), 96), MANY: (_prompts(32, work), 64)}
        if how in ("oracle", "liar"):
            _record(options, works, Path(folder) / "outputs.json")
            kind = "drafts.Oracle" if how == "oracle" else "drafts.Liar"
            options["speculative_config"] = {"method": "custom_class", "model": kind, "num_speculative_tokens": 4}
        else:
            options["spec_method"] = how
        return _run(options, works)


def _model(folder: Path, work: str) -> dict[str, Any]:
    """Options of the model, which is made in `folder`."""
    shape = SHAPE | ({"tie_word_embeddings": False} if work == "copy" else {})
    (folder / "config.json").write_text(json.dumps(shape))
    options = {"model": str(folder), "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 32}
    if work == "copy":
        from safetensors.torch import save_file

        save_file(copying_weights(shape), folder / "model.safetensors", metadata={"format": "pt"})
        return options
    return options | {"load_format": "dummy"} | ({"quantization": "int4"} if work == "int4" else {})


def _prompts(number: int, work: str) -> list[Any]:
    if work == "copy":
        return [{"prompt_token_ids": each} for each in copying_prompts(number)]
    return [
        {"prompt_token_ids": [(97 * row + 31 * i) % 1000 + 10 for i in range(64)]} for row in range(number, 2 * number)
    ]


def _record(options: dict[str, Any], works: dict[str, tuple[list[Any], int]], path: Path) -> None:
    """Writes the outputs without drafts, and tells the class of drafts where they are."""
    from quire import LLM

    known = []
    with LLM(**options, spec_method="off") as llm:
        for prompts, num_tokens in works.values():
            outputs = llm.generate(prompts, _params(num_tokens), use_tqdm=False)
            known += [[each.prompt_token_ids, each.outputs[0].token_ids] for each in outputs]
    path.write_text(json.dumps(known))
    os.environ[OUTPUTS] = str(path)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def _params(num_tokens: int) -> Any:
    from quire import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def _run(options: dict[str, Any], works: dict[str, tuple[list[Any], int]]) -> dict[str, float]:
    from quire import LLM

    rates = {}
    with LLM(**options) as llm:
        for name, (prompts, num_tokens) in works.items():
            for _ in range(2):  # the second run is measured: the prompts are cached, and recordings made
                begun = time.monotonic()
                llm.generate(prompts, _params(num_tokens), use_tqdm=False)
                rates[name] = len(prompts) * num_tokens / (time.monotonic() - begun)
    return rates


def _run_schema(how: str) -> dict[str, float]:
    from quire import LLM, SamplingParams
    from quire.sampling_params import StructuredOutputsParams

    rates = {}
    constraint = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    with LLM(max_num_seqs=8, **({} if how == "forced" else {"spec_method": how})) as llm:
        for name, number in ((ONE, 1), (MANY, 8)):
            params = SamplingParams(temperature=0, max_tokens=1500, structured_outputs=constraint)
            for _ in range(2):
                begun = time.monotonic()
                outputs = llm.generate([f"Values {row}:" for row in range(number)], params, use_tqdm=False)
                seconds = time.monotonic() - begun
                rates[name] = sum(len(each.outputs[0].token_ids) for each in outputs) / seconds
    return rates


if __name__ == "__main__":
    main()
