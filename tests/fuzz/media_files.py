"""Small files of images and sounds in many formats, as their own libraries write them."""

import io

import numpy as np
import soundfile
from PIL import Image

_IMAGES = (
    ("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "I;16"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"),
    ("BMP", "RGB"), ("WEBP", "RGBA"), ("TIFF", "LA"), ("TIFF", "F"), ("TGA", "RGB"), ("PPM", "RGB"), ("ICO", "RGBA"),
)  # fmt: skip
_SOUNDS = (
    ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "MS_ADPCM"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("AU", "ULAW"), ("CAF", "ALAC_16"),
)  # fmt: skip


def image_files() -> list[bytes]:
    """An image of 9 x 7 pixels in several formats and modes."""
    steps = np.arange(63, dtype=np.uint8).reshape(7, 9)
    colors = Image.fromarray(np.stack([steps, steps * 3, 255 - steps], axis=-1), "RGB")
    found = []
    for kind, mode in _IMAGES:
        image = (
            Image.fromarray(steps.astype(np.uint16)) if mode == "I;16" else colors.convert("L" if mode == "F" else mode)
        )
        if mode == "F":
            image = image.convert("F")
        with io.BytesIO() as file:
            image.save(file, kind)
            found.append(file.getvalue())
    return found


def sound_files() -> list[bytes]:
    """A tone of a twentieth of a second in several formats."""
    tone = 0.5 * np.sin(np.arange(800) / 5).astype(np.float32)
    found = []
    for kind, subtype in _SOUNDS:
        if soundfile.check_format(kind, subtype):
            with io.BytesIO() as file:
                soundfile.write(file, tone, 16_000, format=kind, subtype=subtype)
                found.append(file.getvalue())
    return found
