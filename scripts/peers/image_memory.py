"""Memory of a server that reads many images: MB beyond the KV cache after every tenth of 500 distinct ones.

    python scripts/peers/images.py make MODEL
    python scripts/peers/image_memory.py MODEL [--images 500] [--side 448] [--cache-gb 0.25]

Processed images are kept until `--mm-processor-cache-gb` is full: memory grows to that bound and stays there.
"""

import argparse
import base64
import io
import sys
import tempfile
from pathlib import Path

import httpx
import images  # beside this file
import numpy as np
import processes  # beside this file
from PIL import Image

SECONDS, MB = 300.0, 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Folder of the checkpoint.")
    parser.add_argument("--images", type=int, default=500, help="Distinct images (default: %(default)s).")
    parser.add_argument("--side", type=int, default=448, help="Pixels of a side (default: %(default)s).")
    parser.add_argument("--cache-gb", type=float, default=0.25, help="Of processed images (default: %(default)s).")
    args = parser.parse_args()
    command = [
        sys.executable, "-m", "quire", "serve", str(args.model), "--max-model-len", "4096", "--mm-processor-cache-gb",
        str(args.cache_gb), "--kv-cache-memory-bytes", str(2**28), "--chat-template",
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        f"{images.PLACEHOLDER}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        processes.Server(command, {}, SECONDS, Path(folder) / "log") as server,
    ):
        print("| images | MB |\n|---|---|")
        print(f"| 0 | {_megabytes(server):.0f} |", flush=True)
        for number in range(1, args.images + 1):
            _ask(server.base_url, _image(number, args.side))
            if number % max(1, args.images // 10) == 0:
                print(f"| {number} | {_megabytes(server):.0f} |", flush=True)


def _megabytes(server: processes.Server) -> float:
    return server.resident_memory().beyond(0) / MB


def _image(seed: int, side: int) -> str:
    """An address that holds an image of noise as JPEG."""
    buffer = io.BytesIO()
    coarse = np.random.default_rng(seed).integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((side, side)).save(buffer, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _ask(url: str, image: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "w1 w2 w3"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS).raise_for_status()


if __name__ == "__main__":
    main()
