"""The accelerator's ceilings: the rate of a large copy, and of a large product in bfloat16."""

import platform

import torch
import triton
from part_results import Results
from timing import milliseconds


def main() -> None:
    """Measures both and records them with the versions of what runs there."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
    card = torch.cuda.get_device_properties(0)
    Results.of_part().add(
        ceilings={
            "card": card.name,
            "copy_gb_s": round(copy),
            "bf16_tflop_s": round(product),
            "multiprocessors": card.multi_processor_count,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        }
    )


if __name__ == "__main__":
    main()
