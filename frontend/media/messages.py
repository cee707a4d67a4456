"""The messages between the frontend and a helper process that decodes media.

A new kind of media is a question here, its answer, and a reader in `helper_process.READERS`.
"""

from typing import Any, Literal

from msgspec import Struct

from quire.core.wire.media import Array

FloatType = Literal["bfloat16", "float16", "float32"]
"""The dtype of a model."""


class MediaSetup(Struct, array_like=True, tag="setup"):
    """The first message: the model's folder, the limits of one question, and the model's dtype."""

    folder: str
    limit_bytes: int  # of memory
    limit_cpu_seconds: float
    dtype: FloatType = "float32"


class ReadSound(Struct, array_like=True, tag="sound"):
    """A sound, as a file of any format, or as samples. The answer is a `Sound`."""

    data: bytes  # a file; or float32 samples, little-endian, [num_samples]
    sample_rate: int  # of `data`, if it holds samples; 0: `data` is a file
    max_seconds: float  # longer sounds are refused
    divides: bool  # a sound that is longer than the model hears at once is divided at quiet places, and not refused


class Clip(Struct, array_like=True):
    """A part of a sound, as the model's encoder reads it."""

    start_seconds: float
    num_seconds: float
    values: bytes  # float32, little-endian
    num_channels: int


class Sound(Struct, array_like=True, tag="sound"):
    """A sound in clips that follow one another."""

    num_seconds: float
    clips: list[Clip]
    is_large: bool = False  # the helper uses much memory, and should be replaced


class Pixels(Struct, array_like=True, frozen=True):
    """The form of an image without a file's format: its mode in Pillow's words, and its size."""

    mode: str
    width: int
    height: int


class DescribeImages(Struct, array_like=True, tag="describe_images"):
    """Asks what the model's processor makes of images. The answer is an `ItemFacts`."""


class DescribeAudio(Struct, array_like=True, tag="describe_audio"):
    """Asks what the model's processor makes of sounds. The answer is an `ItemFacts`."""


class DescribeVideo(Struct, array_like=True, tag="describe_video"):
    """Asks what the model's processor makes of videos. The answer is an `ItemFacts`."""


class Additions(Struct, array_like=True, frozen=True):
    """What a model's processor writes into a text with items, besides the items' placeholders."""

    after_last: str = ""  # behind the last item
    at_end: str = ""  # of the text

    def __bool__(self) -> bool:
        return bool(self.after_last or self.at_end)


class ItemFacts(Struct, array_like=True, tag="item_facts"):
    """How items of one kind stand in prompts."""

    placeholder: str = ""  # what a text has for an item, before it is expanded
    token_id: int = -1  # stands for one of the tower's rows
    is_whole: bool = False  # an item is a prompt by itself, and no part of a text
    fault: str = ""  # why such items cannot be read; empty if they can
    is_large: bool = False
    additions: Additions = Additions()
    border_ids: tuple[int, ...] = ()  # stand around rows, and the tower makes their embeddings as well


class ReadImage(Struct, array_like=True, tag="image"):
    """An image, as a file or as pixels. The answer is a `ReadyItem`."""

    data: bytes  # of a file, or the rows of `pixels`
    pixels: Pixels | None
    max_pixels: int  # larger images are refused; 0: no limit
    options: dict[str, Any] = {}  # keywords of the processor
    background: tuple[int, int, int] = (255, 255, 255)  # RGB, behind what is transparent


class OpenDocument(Struct, array_like=True, tag="open_document"):
    """A PDF file. The answer is a `DocumentFacts`."""

    data: bytes
    max_pages: int  # a document with more is refused


class DocumentFacts(Struct, array_like=True, tag="document_facts"):
    """What a document has."""

    num_pages: int
    is_large: bool = False


class ReadPage(Struct, array_like=True, tag="page"):
    """A page of a PDF file, as an image. The answer is a `ReadyItem`."""

    data: bytes
    index: int  # from 0
    dpi: int  # pixels an inch
    max_pixels: int  # larger images are refused; 0: no limit
    options: dict[str, Any] = {}  # keywords of the processor


class ReadRows(Struct, array_like=True, tag="rows"):
    """Rows that a tower has made of an image elsewhere, [num_rows, hidden]. The answer is a `ReadyItem`."""

    data: bytes  # a tensor as torch.save writes it
    grid: bytes  # the same, of the image's grid [3]; empty: there is none


class Frames(Struct, array_like=True, frozen=True):
    """The form of a video that is given in frames, and what is known of the video that they are of."""

    shape: tuple[int, int, int] | None = None  # number, height, width, of RGB; None: images in base64, commas between
    fps: float | None = None  # of the video
    indices: list[int] | None = None  # of the frames in the video; None: they are all of it
    total: int | None = None  # frames of the video; None: as many as are given


class Sampling(Struct, array_like=True, frozen=True):
    """Which frames of a video file are taken; the fewer of both."""

    num_frames: int = 32  # at most; 0 or less: all
    fps: float = -1.0  # frames a second at most; 0 or less: no limit


class ReadVideo(Struct, array_like=True, tag="video"):
    """A video, as a file or in frames. The answer is a `ReadyItem`."""

    data: bytes  # of a file, or as `frames` says
    frames: Frames | None
    sampling: Sampling
    max_pixels: int  # of a frame; larger ones are refused; 0: no limit
    options: dict[str, Any] = {}  # keywords of the processor


class ReadAudio(Struct, array_like=True, tag="audio"):
    """A sound of a prompt, as a file or as samples. The answer is a `ReadyItem`."""

    data: bytes  # of a file; or float32 samples, little-endian, [num_samples]
    rate: int | None  # of samples a second; 0: the model's own; None: `data` is a file
    max_seconds: float  # longer sounds are refused
    options: dict[str, Any] = {}  # keywords of the processor


class DivideSound(Struct, array_like=True, tag="divide_sound"):
    """A sound file to be divided for a model that takes sounds in prompts. The answer is a `DividedSound`."""

    data: bytes
    max_seconds: float  # longer sounds are refused
    clip_seconds: float | None  # of a part at most; None: only what the model hears at once


class SoundPart(Struct, array_like=True):
    """A part of a sound, at the model's rate."""

    start_seconds: float
    num_seconds: float
    data: bytes  # samples, float32, little-endian


class DividedSound(Struct, array_like=True, tag="divided_sound"):
    """A sound in parts that follow one another."""

    num_seconds: float
    parts: list[SoundPart]
    is_large: bool = False


class ReadyItem(Struct, array_like=True, tag="ready_item"):
    """An item as the tower reads it, and the text that replaces its placeholder."""

    text: str
    num_rows: int  # tokens of the text that the tower makes rows for
    facts: dict[str, Array]  # see `MediaItem`
    arrays: dict[str, Array]
    digest: bytes  # of all that the tower reads
    is_large: bool = False


class MediaRefused(Struct, array_like=True, tag="refused"):
    """The data is not what it should be. `message` is a sentence's end, such as "is no sound file"."""

    message: str
    field: str = ""  # of the request, which the message is about; empty: the one that has the data
    is_large: bool = False


MediaQuestion = (
    ReadSound
    | DescribeImages
    | ReadImage
    | DescribeAudio
    | ReadAudio
    | DivideSound
    | DescribeVideo
    | ReadVideo
    | ReadRows
    | OpenDocument
    | ReadPage
)
MediaAnswer = Sound | ItemFacts | ReadyItem | DividedSound | DocumentFacts | MediaRefused
