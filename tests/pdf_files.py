"""PDF files: of images, as Pillow writes them, and written by hand, to be odd."""

import io

from PIL import Image


def pdf_of(*pages: Image.Image) -> bytes:
    """A PDF whose pages have a point for each pixel."""
    buffer = io.BytesIO()
    pages[0].save(buffer, "PDF", save_all=True, append_images=pages[1:])
    return buffer.getvalue()


def odd_pdf(box: str = "0 0 9 9", *, num_pages: int = 1, is_encrypted: bool = False) -> bytes:
    """A PDF of empty pages of one size; an encrypted one has a password that nobody knows."""
    kids = " ".join(["3 0 R"] * num_pages)
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {num_pages}>>",
        f"<</Type/Page/Parent 2 0 R/MediaBox[{box}]>>",
    ]
    trailer = "/Root 1 0 R"
    if is_encrypted:
        secret = "A" * 64
        objects.append(f"<</Filter/Standard/V 1/R 2/O<{secret}>/U<{secret}>/P -4>>")
        trailer += "/Encrypt 4 0 R/ID[<00><00>]"
    text, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(text))
        text += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"trailer<</Size {size}{trailer}>>\nstartxref\n{len(text)}\n%%EOF"
    return f"{text}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode()
