"""Decodes images, as Transformers and vLLM do: turned by EXIF, one frame, in RGB, what is transparent on white.

Only helper processes decode: the libraries are written in C, and the files come from anywhere.
"""

import contextlib
import io

from quire.frontend.media.errors import MediaError, MissingLibraryError
from quire.frontend.media.messages import Pixels

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError:
    raise MissingLibraryError("Pillow") from None

FORMATS = (
    *("AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM"),
    *("IMT", "IPTC", "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI"),
    *("SPIDER", "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM", "XVTHUMB"),
)
"""Those that Pillow reads itself. It gives EPS and WMF to other programs."""
_TRANSPARENT = ("RGBA", "LA", "PA")
_WHITE = (255, 255, 255)


def read_image(
    content: bytes, pixels: Pixels | None, max_pixels: int, background: tuple[int, int, int] = _WHITE
) -> Image.Image:
    """Returns an image in RGB.

    Args:
        background: what lies behind transparent places, RGB.

    Raises:
        MediaError: it is none, too large, or cut off.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    try:
        if pixels is not None:
            check_size((pixels.width, pixels.height), max_pixels)
            return _in_rgb(Image.frombytes(pixels.mode, (pixels.width, pixels.height), content), background)
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
        check_size(image.size, max_pixels)
        image.load()  # raises for a file that is cut off
        with contextlib.suppress(Exception):  # EXIF may hold anything
            image = ImageOps.exif_transpose(image)
        return _in_rgb(image, background)
    except UnidentifiedImageError:
        raise MediaError("is no image in a format that is read here") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise MediaError(f"is an image that cannot be decoded ({error})") from None


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raises MediaError for an image of more pixels than `max_pixels`; 0: no limit."""
    width, height = size
    if max_pixels and width * height > max_pixels:
        raise MediaError(
            f"has {width} x {height} pixels, and {max_pixels} are read (QUIRE_MAX_IMAGE_PIXELS); send it smaller"
        )


def _in_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        seen = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", seen.size, background)
        image.paste(seen, mask=seen.getchannel("A"))
    return image if image.mode == "RGB" else image.convert("RGB")
