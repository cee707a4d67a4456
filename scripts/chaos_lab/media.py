"""Requests with images and sounds, which are drawn here, so that no library is needed."""

import base64
import math
import random
import struct
import wave
import zlib
from io import BytesIO
from typing import Any

SOUND_RATE = 16_000


def image_url(rng: random.Random, width: int, height: int) -> str:
    """A picture of random colors as a `data:` URL, in PNG (ISO 15948)."""
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def messages_with_images(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """A conversation with so many images between its words."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"What is in picture {rng.randrange(10**6)}?"}]
    for _ in range(count):
        url = image_url(rng, rng.randrange(30, 120), rng.randrange(30, 120))
        content += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "And then?"}]
    return [{"role": "user", "content": content}]


def sound(rng: random.Random, seconds: float) -> bytes:
    """A WAV file of two tones that come and go."""
    tones, phase = (rng.uniform(100, 2000), rng.uniform(100, 2000)), rng.uniform(0, 6)
    samples = bytearray()
    for place in range(int(seconds * SOUND_RATE)):
        time = place / SOUND_RATE
        loud = 6000 * (1 + math.sin(3 * time + phase))
        samples += struct.pack("<h", int(loud * sum(math.sin(2 * math.pi * tone * time) for tone in tones)))
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SOUND_RATE)
        writer.writeframes(bytes(samples))
    return file.getvalue()
