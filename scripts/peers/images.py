"""Time to the first token of a prompt with an image: the shape of Qwen2.5-VL 3B, two layers deep, by several engines.

    python scripts/peers/images.py make MODEL
    python scripts/peers/images.py compare MODEL --engines quire:bfloat16 transformers:bfloat16 \
        --peers llama.cpp --peer-python VENV/bin/python

`make` writes a checkpoint of random weights (two layers of text and two of the tower) and `IMAGES` images of
noise, a megapixel each, as JPEG files. Each engine of `compare` runs in a process of its own, in turn, and is given the
bytes of a file. llama.cpp reads the same weights from two GGUF files, which it writes beside the checkpoint; its
environment has xllamacpp, gguf and numpy. A prompt is an image and `NUM_WORDS` words.
"""

import argparse
import base64
import io
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns  # beside this file

IMAGES, SIZE, NUM_WORDS = 8, (1008, 1008), 64
NEW, AGAIN = "a new image, ms", "the same again, ms"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEXT: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151_936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    "fullatt_block_indexes": [1], "window_size": 112, "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

Ask = Callable[[bytes, str], None]
"""Asks for one token after an image, the bytes of a JPEG file, and a text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="Write the checkpoint and the images.")
    make.add_argument("model", type=Path, help="The folder for them.")
    compare = commands.add_parser("compare", help="Measure engines in turn.")
    compare.add_argument("model", type=Path, help="Folder of the checkpoint.")
    turns.add_options(compare)
    args = parser.parse_args()
    if args.command == "make":
        _make(args.model)
    elif args.measure:
        engine, *settings = args.measure.split(":")
        print(json.dumps(_measure(args.model, ENGINES[engine](args.model, *settings))))
    else:
        _compare(args)


def _compare(args: argparse.Namespace) -> None:
    found = turns.run(args, [__file__, "compare", str(args.model)])
    print(f"| time to the first token | {NEW} | {AGAIN} |\n|---|---|---|")
    for name, runs in found.items():
        medians = (statistics.median(run[work] for run in runs) for work in (NEW, AGAIN))
        print(f"| {name} | " + " | ".join(f"{each:.0f}" for each in medians) + " |")


def _measure(model: Path, ask: Ask) -> dict[str, float]:
    """Returns medians over the images, after one that is not counted. Texts differ, and begin alike after an image."""
    files = [(model / f"{number}.jpg").read_bytes() for number in range(IMAGES)]

    def milliseconds(file: bytes, seed: int) -> float:
        text = " ".join(f"w{(31 * word + 7 * seed) % 999}" for word in range(NUM_WORDS))
        started = time.perf_counter()
        ask(file, text)
        return 1000 * (time.perf_counter() - started)

    milliseconds(files[0], 0)
    new = [milliseconds(file, number) for number, file in enumerate(files[1:])]
    again = [milliseconds(file, 50 + number) for number, file in enumerate(files[1:])]
    return {NEW: statistics.median(new), AGAIN: statistics.median(again)}


def _quire(model: Path, dtype: str = "auto") -> Ask:
    from quire import LLM, SamplingParams

    llm = LLM(str(model), dtype=dtype, max_model_len=4096, max_num_batched_tokens=4096)
    sampling = SamplingParams(temperature=0, max_tokens=1)

    def ask(file: bytes, text: str) -> None:
        prompt: Any = {"prompt": PLACEHOLDER + text, "multi_modal_data": {"image": file}}
        llm.generate(prompt, sampling, use_tqdm=False)

    return ask


def _transformers(model: Path, dtype: str = "float32") -> Ask:
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(model), Qwen2VLImageProcessorPil.from_pretrained(model)

    def ask(file: bytes, text: str) -> None:  # without a processor of videos, which asks for torchvision
        image = processor(images=[Image.open(io.BytesIO(file)).convert("RGB")], return_tensors="pt")
        rows = int(image["image_grid_thw"].prod()) // VISION["spatial_merge_size"] ** 2
        prompt = PLACEHOLDER.replace("<|image_pad|>", "<|image_pad|>" * rows) + text
        inputs = tokenizer(prompt, return_tensors="pt")
        kinds = (inputs["input_ids"] == loaded.config.image_token_id).int()
        with torch.inference_mode():
            loaded.generate(**inputs, **image, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=1)

    return ask


def _llama_cpp(model: Path) -> Ask:
    import xllamacpp

    files = model / "text.gguf", model / "tower.gguf"
    if not all(file.exists() for file in files):
        _write_gguf(model, *files)
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = map(str, files)
    params.n_parallel, params.n_ctx, params.n_batch, params.n_ubatch = 1, 4096, 2048, 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.verbosity = -1
    server = xllamacpp.Server(params)
    with urllib.request.urlopen(f"{server.listening_address}/props") as answer:
        marker = json.load(answer)["media_marker"]

    def ask(file: bytes, text: str) -> None:
        prompt = {"prompt_string": f"{marker}{text}", "multimodal_data": [base64.b64encode(file).decode()]}
        body = json.dumps({"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        if found["tokens_evaluated"] < 1296:
            raise SystemExit(f"the image was not read: {found['tokens_evaluated']} tokens")

    return ask


ENGINES: dict[str, Callable[..., Ask]] = {"quire": _quire, "transformers": _transformers, "llama.cpp": _llama_cpp}


def _make(folder: Path) -> None:
    """Writes random weights in bfloat16, a tokenizer of words without a meaning, and the images."""
    import numpy as np
    import torch
    import transformers
    from PIL import Image
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"w{number}" for number in range(1000)]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ids = {token: len(words) + place for place, token in enumerate(SPECIAL)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0], unk_token=SPECIAL[0],
        extra_special_tokens={"image_token": SPECIAL[3], "video_token": SPECIAL[4]},
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=ids["<|image_pad|>"], dtype="bfloat16",
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280 * 4}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "size": sizes, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "size": sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    draw = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = Image.fromarray(draw.integers(0, 256, (63, 63, 3), dtype=np.uint8))
        coarse.resize(SIZE).save(folder / f"{number}.jpg", quality=90)


def _write_gguf(model: Path, text: Path, tower: Path) -> None:
    """Writes the checkpoint as llama.cpp reads it: the text model, and the tower with its projector."""
    import gguf

    tensors, names = _tensors(model), gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2VL, TEXT["num_hidden_layers"])
    writer = gguf.GGUFWriter(text, "qwen2vl")
    writer.add_context_length(TEXT["max_position_embeddings"])
    writer.add_embedding_length(TEXT["hidden_size"])
    writer.add_block_count(TEXT["num_hidden_layers"])
    writer.add_feed_forward_length(TEXT["intermediate_size"])
    writer.add_head_count(TEXT["num_attention_heads"])
    writer.add_head_count_kv(TEXT["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(TEXT["rms_norm_eps"])
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_sections([*TEXT["rope_parameters"]["mrope_section"], 0])
    _add_tokens(writer, model)
    for name, (shape, data) in tensors.items():
        if "visual" not in name:
            _add(writer, names.get_name(name.replace("language_model.", ""), (".weight", ".bias")), shape, data)
    _close(writer)

    writer = gguf.GGUFWriter(tower, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen2.5vl_merger")
    writer.add_vision_projection_dim(VISION["out_hidden_size"])
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(VISION["patch_size"])
    writer.add_vision_embedding_length(VISION["hidden_size"])
    writer.add_vision_feed_forward_length(VISION["intermediate_size"])
    writer.add_vision_block_count(VISION["depth"])
    writer.add_vision_head_count(VISION["num_heads"])
    writer.add_vision_image_mean(MEAN)
    writer.add_vision_image_std(STD)
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(VISION["fullatt_block_indexes"][0] + 1)
    writer.add_vision_attention_layernorm_eps(1e-6)
    for name, (shape, data) in tensors.items():
        if "visual" in name:
            for part, part_shape, part_data in _tower_parts(name.partition("visual.")[2], shape, data):
                _add(writer, part, part_shape, part_data)
    _close(writer)


def _tower_parts(name: str, shape: list[int], data: Any) -> list[tuple[str, list[int], Any]]:
    """Returns tensors by llama.cpp's names: two frames' patches apart, and queries, keys and values."""
    if name == "patch_embed.proj.weight":
        frames = data.reshape(shape)
        return [
            (f"v.patch_embd.weight{end}", [*shape[:2], *shape[3:]], frames[:, :, at].copy())
            for at, end in enumerate(("", ".1"))
        ]
    name = name.replace("blocks.", "v.blk.").replace("norm1", "ln1").replace("norm2", "ln2")
    name = name.replace("attn.proj", "attn_out").replace("merger.ln_q", "v.post_ln").replace("merger.mlp", "mm")
    for kind in ("gate", "up", "down"):
        name = name.replace(f"mlp.{kind}_proj", f"ffn_{kind}")
    if "attn.qkv" not in name:
        return [(name, shape, data)]
    third, thirds = [shape[0] // 3, *shape[1:]], data.reshape(3, -1)
    return [(name.replace("attn.qkv", f"attn_{kind}"), third, thirds[at]) for at, kind in enumerate("qkv")]


def _add(writer: Any, name: str, shape: list[int], data: Any) -> None:
    """Adds a tensor: matrices as they are, vectors and patches in float32."""
    import gguf
    import numpy as np

    if len(shape) == 2:
        writer.add_tensor(name, data.reshape(shape).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, (data.astype(np.uint32) << 16).view(np.float32).reshape(shape))


def _tensors(model: Path) -> dict[str, tuple[list[int], Any]]:
    """Returns the shapes and the bits, uint16, of a checkpoint's tensors, all in bfloat16."""
    import numpy as np

    content = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = (entry["shape"], np.frombuffer(content[start:end], np.uint16))
    return found


def _add_tokens(writer: Any, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = [f"<unused{number}>" for number in range(TEXT["vocab_size"])]
    kinds = [1] * len(tokens)
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number] = token
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])  # it asks for one
    writer.add_eos_token_id(tokens.index(SPECIAL[0]))


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
