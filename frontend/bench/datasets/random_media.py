"""`--dataset-name random-mm`: random prompts with images and videos of noise."""

import argparse
import ast
import base64
import io
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.core.errors import ConfigError
from quire.frontend.bench.datasets.random import RandomDataset
from quire.frontend.bench.datasets.request import BenchRequest, Vocabulary

_FRAMES_A_SECOND = 8
_KINDS = ("image", "video")


class Bucket(NamedTuple):
    """Items of one size, and how often they are drawn. Those of several frames are videos."""

    height: int
    width: int
    num_frames: int
    share: float

    @property
    def kind(self) -> str:
        return "image" if self.num_frames == 1 else "video"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags for this dataset. The flags of the random dataset say what the texts are."""
    group = parser.add_argument_group("random-mm dataset")
    group.add_argument(
        "--random-mm-base-items-per-request", type=int, default=1, help="Items of a request (default: %(default)s)."
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        help="Their number is uniform within this share of the given one, 0 to 1 (default: all equal).",
    )
    group.add_argument(
        "--random-mm-limit-mm-per-prompt",
        type=_limits,
        default='{"image": 255, "video": 1}',
        metavar="JSON",
        help="The most items of each kind in a request (default: %(default)s).",
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=_buckets,
        default="{(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}",
        metavar="{(HEIGHT, WIDTH, FRAMES): SHARE}",
        help="Sizes of items, and the share of each; several frames are a video (default: %(default)s).",
    )


class RandomMediaDataset:
    """The dataset of random token ids beside noise. The texts are those of the random dataset with the same flags."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._texts = RandomDataset(args)
        self._buckets: list[Bucket] = args.random_mm_bucket_config
        self._limits: dict[str, int] = args.random_mm_limit_mm_per_prompt
        count, ratio = args.random_mm_base_items_per_request, args.random_mm_num_mm_items_range_ratio
        if count < 0:
            raise ConfigError(f"--random-mm-base-items-per-request must be at least 0, got {count}.")
        if not 0 <= ratio <= 1:
            raise ConfigError(f"--random-mm-num-mm-items-range-ratio must be in [0, 1], got {ratio}.")
        room = sum(self._limits.get(kind, 0) for kind in {bucket.kind for bucket in self._buckets})
        self._fewest, self._most = math.floor(count * (1 - ratio)), min(room, math.ceil(count * (1 + ratio)))
        if self._fewest > self._most:
            raise ConfigError(
                f"--random-mm-limit-mm-per-prompt leaves room for {room} items, and a request has {self._fewest} at "
                "least; raise it, or lower --random-mm-base-items-per-request."
            )

    def requests(self, num_prompts: int, vocabulary: Vocabulary, seed: int) -> list[BenchRequest]:
        requests = self._texts.requests(num_prompts, vocabulary, seed)
        generator = np.random.default_rng((seed, 1))  # another sequence than that of the texts
        for request in requests:
            request.parts = [self._part(bucket, generator) for bucket in self._drawn(generator)]
        return requests

    def _drawn(self, generator: np.random.Generator) -> list[Bucket]:
        """The items of one request. A kind of which there are as many as may be is drawn no more."""
        left = dict(self._limits)
        drawn: list[Bucket] = []
        for _ in range(int(generator.integers(self._fewest, self._most + 1))):
            open_buckets = [bucket for bucket in self._buckets if left.get(bucket.kind, 0) > 0]
            shares = np.array([bucket.share for bucket in open_buckets])
            drawn.append(open_buckets[generator.choice(len(open_buckets), p=shares / shares.sum())])
            left[drawn[-1].kind] -= 1
        return drawn

    def _part(self, bucket: Bucket, generator: np.random.Generator) -> dict[str, Any]:
        """A part of a chat message's content."""
        shape = (bucket.num_frames, bucket.height, bucket.width, 3)
        pixels = generator.integers(0, 256, shape, np.uint8)
        if bucket.kind == "image":
            return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", _jpeg(pixels[0]))}}
        return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", _mp4(pixels))}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _jpeg(pixels: np.ndarray) -> bytes:
    """An image [height, width, 3] of uint8 as a file."""
    try:
        from PIL import Image
    except ImportError:
        raise _missing("Pillow") from None
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def _mp4(frames: np.ndarray) -> bytes:
    """Frames [num_frames, height, width, 3] of uint8 as a file."""
    try:
        import av
    except ImportError:
        raise _missing("PyAV") from None
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=_FRAMES_A_SECOND)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def _missing(name: str) -> ConfigError:
    return ConfigError(f"--dataset-name random-mm needs {name}: pip install 'quire[media]'.")


def _limits(text: str) -> dict[str, int]:
    try:
        found = msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"image": 3, "video": 0}}') from None
    if unknown := set(found) - set(_KINDS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)[0]!r} is unknown; items are of the kinds image and video")
    return found


def _buckets(text: str) -> list[Bucket]:
    """Buckets that have a share. Python's syntax, as vLLM reads it: keys of JSON cannot be tuples."""
    example = f"{text!r} is not such as {{(256, 256, 1): 0.5, (720, 1280, 16): 0.5}}"
    try:
        found = ast.literal_eval(text)
        buckets = [Bucket(int(h), int(w), int(n), float(share)) for (h, w, n), share in found.items()]
    except (ValueError, SyntaxError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(example) from None
    if any(min(bucket) < 0 or min(bucket[:3]) < 1 for bucket in buckets):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are at least 1, and shares at least 0")
    if not (shared := [bucket for bucket in buckets if bucket.share > 0]):
        raise argparse.ArgumentTypeError(f"{text!r} gives nothing a share; {example}")
    return shared
