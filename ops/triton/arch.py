"""The kinds of cards that kernels are compiled for."""

from typing import NamedTuple


class Arch(NamedTuple):
    """A kind of card.

    Attributes:
        name: `sm_90`, `gfx942`.
        backend: Triton's name of its compiler: `cuda` or `hip`.
        target: what that compiler calls the card.
        warp_size: threads of a warp.
        max_shared_bytes: shared memory that one program may have.
        num_registers: 32-bit registers of a multiprocessor.
    """

    name: str
    backend: str
    target: int | str
    warp_size: int
    max_shared_bytes: int
    num_registers: int


ARCHES = {
    each.name: each
    for each in (
        Arch("sm_80", "cuda", 80, 32, 166_912, 65_536),
        Arch("sm_86", "cuda", 86, 32, 101_376, 65_536),
        Arch("sm_89", "cuda", 89, 32, 101_376, 65_536),
        Arch("sm_90", "cuda", 90, 32, 232_448, 65_536),
        Arch("sm_100", "cuda", 100, 32, 232_448, 65_536),
        Arch("sm_120", "cuda", 120, 32, 101_376, 65_536),
        Arch("gfx942", "hip", "gfx942", 64, 65_536, 131_072),
    )
}


def fitting_stages(num_stages: int, shared_bytes: int, limit: int) -> int:
    """Stages of a pipeline that fit into `limit` bytes, by those that `num_stages` take; at least 1.

    A stage is taken for its share of all bytes, of which some are none of the pipeline's. So it may have to be asked
    again.
    """
    if shared_bytes <= limit or num_stages == 1:
        return num_stages
    return max(1, min(num_stages - 1, limit * num_stages // shared_bytes))


def arch_of(name: str) -> Arch:
    """The card of this name; one that the table lacks is taken for the next older one of the table.

    Raises:
        ValueError: no kernels are compiled for such a card.
    """
    if name in ARCHES:
        return ARCHES[name]
    number = name.removeprefix("sm_")
    older = [each for each in ARCHES.values() if number.isdigit() and f"{each.target}".isdigit()]
    known = max((each for each in older if int(each.target) <= int(number)), key=lambda each: each.target, default=None)
    if not name.startswith("sm_") or known is None:
        raise ValueError(f"No Triton kernels for {name!r}; choose one of {', '.join(ARCHES)}.")
    return known._replace(name=name, target=int(number))
