"""Compares every decoder and encoder of text that Transformers has, every model with both, and every model that reads
images or sounds, with Quire, and writes docs/models.md.

    .venv/bin/python -m scripts.model_coverage [--only NAME ...] [--again] [--jobs 1] [--write]

A tiny random checkpoint of each model type runs in a process of its own; `encoder/bert` names that of an encoder,
`encoder-decoder/bart` that of a model with both, `image/llava` that of a model that reads images, and `audio/whisper`
that of one that hears.
Results are kept in docs/models.json, each with the commit that it was measured at, and only missing ones are computed.
"""

import argparse
import json
import multiprocessing
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from quire.core.config.model import ModelImplementation
from quire.core.errors import ConfigError
from quire.executor.models.architectures import ARCHITECTURES
from tests.executor.models import (
    any_audio_model,
    any_encoder,
    any_encoder_decoder,
    any_image_decoder,
    any_image_model,
)
from tests.executor.models.coverage import TOLERANCE, measure
from tests.executor.models.tiny_models import MODEL_TYPES, Reference, write_checkpoint

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "models.json"
SECONDS = 300
"""A model type has as many."""
_REASON = 120  # letters
_ENCODER, _BOTH, _IMAGE, _AUDIO = "encoder/", "encoder-decoder/", "image/", "audio/"
"""What the names of results begin with, before the model types: of encoders, of models with an encoder and a decoder,
and of models that read images or sounds."""

DECODERS = MODEL_TYPES
ENCODERS = [f"{_ENCODER}{name}" for name in any_encoder.MODEL_TYPES]
ENCODER_DECODERS = [f"{_BOTH}{name}" for name in any_encoder_decoder.MODEL_TYPES]
IMAGE_MODELS = [f"{_IMAGE}{name}" for name in any_image_model.MODEL_TYPES if name not in any_image_model.OTHER_KINDS]

AUDIO_MODELS = [f"{_AUDIO}{name}" for name in any_audio_model.MODEL_TYPES if name not in any_audio_model.OTHER_KINDS]

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these model types of Transformers")
    parser.add_argument("--again", action="store_true", help="compute results that are there already")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    args = parser.parse_args()
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    chosen = args.only or [*DECODERS, *ENCODERS, *ENCODER_DECODERS, *IMAGE_MODELS, *AUDIO_MODELS]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    missing = [name for name in chosen if args.again or name not in results]
    for first in range(0, len(missing), args.jobs):
        for name, result in run_processes(missing[first : first + args.jobs]):
            results[name] = {**result, "commit": commit}
            print(name, json.dumps(result), flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True))
    if args.write:
        (ROOT / "docs" / "models.md").write_text(page(results))


def run_processes(names: list[str]) -> list[tuple[str, Result]]:
    """The results of some model types, computed side by side."""
    context = multiprocessing.get_context("fork")  # Transformers is imported once
    running = []
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda n=name, s=sender: s.send(compare(n)))
        process.start()
        sender.close()
        running.append((name, process, receiver))
    found = []
    for name, process, receiver in running:
        result: Result = {"error": f"took more than {SECONDS} s"}
        try:
            if receiver.poll(SECONDS):
                result = receiver.recv()
        except EOFError:
            result = {"error": "the process ended"}
        process.kill()
        process.join()
        found.append((name, result))
    return found


def compare(name: str) -> Result:
    """The result of one model type; `error` says why there is no comparison."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if name.startswith(_ENCODER):
        return _compare_encoder(name.removeprefix(_ENCODER))
    if name.startswith(_BOTH):
        return _compare_encoder_decoder(name.removeprefix(_BOTH))
    if name.startswith(_IMAGE):
        return _compare_image_model(name.removeprefix(_IMAGE))
    if name.startswith(_AUDIO):
        return _compare_audio_model(name.removeprefix(_AUDIO))
    return _compare_decoder(name)


def _compare_decoder(model_type: str) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            architecture = write_checkpoint(folder, model_type)
            reference = Reference(folder)
            reference.logprobs([5, 6, 7])
        except Exception as error:  # whatever the library raises
            return {"error": f"Transformers: {_text(error)}"}
        result: Result = {"architecture": architecture}
        for implementation in _implementations(architecture):
            result[implementation] = _measured(folder, lambda: measure(folder, reference, implementation))  # noqa: B023
        return result


def _compare_encoder(model_type: str) -> Result:
    """The differences of each class of the type, the base first."""
    first, *heads = any_encoder.classes(model_type)
    result: Result = {"architecture": first, "classes": {}}
    for name in (first, *heads):
        with tempfile.TemporaryDirectory() as place:
            folder, found = Path(place), result["classes"].setdefault(name, {})
            try:
                reference = any_encoder.write_checkpoint(folder, model_type, name)
                any_encoder.output_of(reference, any_encoder.PROMPTS[0])
            except Exception as error:  # whatever the library raises
                found["error"] = f"Transformers: {_text(error)}"
                continue
            for each in _implementations(name):
                found[each] = _measured(folder, lambda: any_encoder.measure(folder, reference, each))  # noqa: B023
    return result if set(result["classes"][first]) != {"error"} else result["classes"][first]


def _compare_encoder_decoder(model_type: str) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            reference = any_encoder_decoder.write_checkpoint(folder, model_type)
        except Exception as error:  # whatever the library raises
            return {"error": f"Transformers: {_text(error)}"}
        found = _measured(folder, lambda: any_encoder_decoder.measure(folder, reference))
        return {"architecture": any_encoder_decoder.architecture_of(model_type), "quire": found}


def _compare_image_decoder(model_type: str) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            reference = any_image_decoder.write_checkpoint(folder, model_type)
        except Exception as error:  # whatever the library raises
            return {"error": f"Transformers: {_text(error)}"}
        found = _measured(folder, lambda: any_image_decoder.measure(folder, reference))
        return {"architecture": any_image_decoder.architecture_of(model_type), "quire": found}


def _compare_image_model(model_type: str) -> Result:
    if model_type in any_image_decoder.MODEL_TYPES:
        return _compare_image_decoder(model_type)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            reference = any_image_model.write_checkpoint(folder, model_type)
            prompt = any_image_model.make_prompt(reference)
            expected = any_image_model.logprobs(reference, prompt)
        except Exception as error:  # whatever the library raises
            return {"error": f"Transformers: {_text(error)}"}
        architecture = any_image_model.architecture_of(model_type)
        result: Result = {"architecture": architecture}
        for each in _implementations(architecture):
            result[each] = _measured(folder, lambda: any_image_model.measure(folder, prompt, expected, each))  # noqa: B023
        return result


def _compare_audio_model(model_type: str) -> Result:
    architecture = any_audio_model.architecture_of(model_type)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model_type == "whisper":
            return {
                "architecture": architecture,
                "quire": _measured(folder, lambda: any_audio_model.measure_whisper(folder)),
            }
        try:
            prompt = any_audio_model.Prompt(any_audio_model.write_checkpoint(folder, model_type))
        except Exception as error:  # whatever the library raises
            return {"error": f"Transformers: {_text(error)}"}
        found = _measured(folder, lambda: any_audio_model.measure(folder, prompt))
        return {"architecture": architecture, "transformers": found}


def _implementations(architecture: str) -> tuple[ModelImplementation, ...]:
    return ("quire", "transformers") if architecture in ARCHITECTURES else ("transformers",)


def _measured(folder: Path, run: Callable[[], Any]) -> Any:
    """What `run` returns, or else the reason why it does not."""
    try:
        return run()
    except ConfigError as error:
        return str(error).replace(str(folder), "the checkpoint")
    except Exception as error:  # to be told, not to end the run
        return _text(error)


def _text(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def page(results: dict[str, Result]) -> str:
    """docs/models.md."""
    decoders = {name: results[name] for name in DECODERS if name in results}
    encoders = {
        f"{name.removeprefix(_ENCODER)} {architecture}": {
            "architecture": architecture,
            "commit": results[name]["commit"],
            **found,
        }
        for name in ENCODERS
        for architecture, found in results.get(name, {}).get("classes", {}).items()
    }
    both = {name.removeprefix(_BOTH): results[name] for name in ENCODER_DECODERS if name in results}
    images = {name.removeprefix(_IMAGE): results[name] for name in IMAGE_MODELS if name in results}
    sounds = {name.removeprefix(_AUDIO): results[name] for name in AUDIO_MODELS if name in results}
    return "\n".join(
        [
            "# Models",
            "",
            f"Every decoder of text that Transformers {transformers.__version__} has, as a tiny random checkpoint in "
            f"float32: Quire serves {_count(decoders)} with log-probabilities within {TOLERANCE:g} of the "
            "library's at every position, and the same greedy tokens. Of the [encoders](#encoders) it serves "
            f"{_count(encoders)} with hidden states, labels and scores of the vocabulary within the same bound, and of "
            f"the [models with an encoder and a decoder](#encoder-decoders) {_count(both)}, and of the [models that "
            f"read images](#images) {_count(images, len(any_image_model.OTHER_KINDS))}, and of the [models that "
            f"hear](#sounds) {_count(sounds, len(any_audio_model.OTHER_KINDS))}, with log-probabilities and "
            "tokens as those of decoders.",
            "",
            "A figure is the largest difference over a prompt in chunks of odd sizes, together with another request, "
            "and after a cached prefix. If a prompt's tokens see each other, it is that over a whole prompt and its "
            "output. The column `quire` is Quire's own file, `transformers` the library's class with Quire's parts "
            "(`--model-impl`). `auto` takes the first that serves a model. The last column is the measured commit. "
            "`python -m scripts.model_coverage --write` prints this page.",
            "",
            *_section(decoders),
            "## Encoders",
            "",
            "A figure is the largest difference over five texts of 1 to 90 tokens, computed together and in the other "
            "order: of hidden states for a class without a head, else of the logits of its head. It is relative to the "
            "largest number where that exceeds 1.",
            "",
            *_section(encoders),
            "## Encoder-decoders",
            "",
            "A figure is the largest difference over greedy outputs for five inputs of 1 to 90 tokens, and over a "
            "prompt of the decoder, all computed together. [encoder_decoder.md](encoder_decoder.md) says how to ask.",
            "",
            *_section(both),
            "## Images",
            "",
            "A figure is the largest difference over a prompt with three images among text, in chunks of odd sizes, "
            "some of which end inside an image, and then token by token. The images differ in size where a class "
            "takes several. [images.md](images.md) says how to ask. Chameleon's figure is rounding: the library's own "
            "in float32 and float64 differ by 2e-4.",
            "",
            *_section(images, any_image_model.OTHER_KINDS),
            "## Sounds",
            "",
            "A figure is the largest difference over a prompt with two sounds among text, in chunks, one of which ends "
            "inside a sound; of Whisper, that over greedy outputs. Towers are given arrays. Models that read images as "
            "well, such as Phi-4 multimodal and Gemma 3n, are above. [audio.md](audio.md) says how to ask.",
            "",
            *_section(sounds, any_audio_model.OTHER_KINDS),
            *_missing([name for name in (*ENCODERS, *IMAGE_MODELS, *AUDIO_MODELS) if name not in results]),
        ]
    )


def _missing(names: list[str]) -> list[str]:
    """A line about models without a result."""
    types = ", ".join(name.rpartition("/")[2] for name in names)
    return [f"Not measured yet: {types}.", ""] if names else []


def _count(results: dict[str, Result], num_others: int = 0) -> str:
    """The number of models that are served, of all; `num_others` are of kinds that are not."""
    compared = [result for result in results.values() if "error" not in result]
    return f"{sum(_best(result) is not None for result in compared)} of {len(compared) + num_others}"


def _section(results: dict[str, Result], others: Mapping[str, str] = {}) -> list[str]:
    """A table, and the reasons of what it lacks. A name begins with the model type; `others` are not tried."""
    compared = {name: result for name, result in results.items() if "error" not in result}
    rows = [
        f"| `{result['architecture']}` | {name.split()[0]} | {_cell(result.get('quire'))} "
        f"| {_cell(result.get('transformers'))} | {result['commit']} |"
        for name, result in sorted(compared.items(), key=lambda item: item[1]["architecture"])
    ]
    refused = {
        (kind if kind in WITHOUT_A_PATH else result["architecture"]): None
        for name, result in compared.items()
        if _best(result) is None
        for kind in [name.split()[0]]
        if {kind, result["architecture"]} & WITHOUT_A_PATH.keys()
    }
    reasons = {**{name: WITHOUT_A_PATH[name] for name in refused}, **others}
    left_out = [f"- {name}: {_reason(result['error'])}" for name, result in results.items() if "error" in result]
    return [
        "| architecture | model type | quire | transformers | commit |",
        "|---|---|---|---|---|",
        *rows,
        "",
        *(["Not served, for what they are:", ""] if reasons else []),
        *(f"- {name}: {reason}." for name, reason in reasons.items()),
        *([""] if reasons else []),
        *(["Not compared, because the library's own tiny model does not run:", "", *left_out, ""] if left_out else []),
    ]


WITHOUT_A_PATH = {
    "nllb-moe": "the library computes each token with the experts 0 and 1, whichever its router chooses, so that "
    "nothing tells what is right",
    "prophetnet": "the decoder of a model that reads its prompts with an encoder. It predicts in streams besides "
    "the tokens' own, and its code takes a whole prompt or one token",
    "reformer": "random hashes of the whole sequence say which tokens see each other, in chunks of a fixed length, and "
    "what it keeps of them are hidden states",
    "canine": "its tokens are the code points of letters, of which there is no vocabulary",
    "FunnelForSequenceClassification": "its hidden states are of groups of tokens",
    "perceiver": "its hidden states are those of latents, and its tokens have none",
    "t5gemma": "the library writes no sizes of an encoder alone",
    "xlnet": "predicts in a second stream, in the place of an empty token at the end; all tokens see each other, and "
    "the library computes the last two again with each new one, from hidden states instead of keys and values",
}
"""Why decoders that are not served cannot be: model type → what they are."""


def _reason(text: str) -> str:
    """A refusal in one line: why the class does not run over pages or row by row, if that is what it is about."""
    found = re.search(r"(?:row by row|over pages)(?: \(|: )(.*?)\)?\. Quire", text)
    reason = (found[1] if found else text.splitlines()[0]).removeprefix("Transformers: ")
    reason = re.sub(r"the checkpoint(/|: )| in \w+ForCausalLM", "", reason)
    reason = re.split(r"[;.] | \(| of type ", reason, maxsplit=1)[0].rstrip(".:").replace("|", "\\|")
    return reason if len(reason) < _REASON else reason[:_REASON].rpartition(" ")[0] + " ..."


def _agrees(value: Any) -> bool:
    if isinstance(value, float):
        return value < TOLERANCE
    return isinstance(value, (list, tuple)) and value[0] < TOLERANCE and value[1]


def _best(result: Result) -> str | None:
    """Returns the column that `auto` takes, if it agrees with the library."""
    served = [name for name in ("quire", "transformers") if not isinstance(result.get(name), str | None)]
    return served[0] if served and _agrees(result[served[0]]) else None


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return f"refused: {_reason(value)}"
    difference, same_tokens = (value, True) if isinstance(value, float) else value
    return f"{difference:.1e}" + ("" if same_tokens else ", other tokens")


if __name__ == "__main__":
    main()
