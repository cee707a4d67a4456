"""Names of modules that end alike, against a comparison of all names with each other."""

import random
from itertools import product

from quire.executor.layers.module_names import ModuleNames


def alike(module: str, names: list[str]) -> list[str]:
    """What `ModuleNames.alike` returns, one name after the other."""
    if module in names:
        return [module]
    return [name for name in names if name.endswith(f".{module}") or module.endswith(f".{name}")]


def test_names_are_found_by_their_ends_in_both_directions() -> None:
    rng = random.Random(0)
    known, asked = ([".".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(60)] for _ in range(2))
    names = ModuleNames(known)
    for module in [*asked, "", ".", "a..b", "d", "a.b.c.a.b.c"]:
        assert sorted(names.alike(module)) == sorted(alike(module, list(dict.fromkeys(known)))), module


def test_each_of_many_experts_is_found_where_a_rank_has_a_part_of_them() -> None:
    layers, numbers, parts = range(48), range(128), ("gate_proj", "up_proj", "down_proj")
    own = [".".join(("layers", f"{n}.mlp.experts.{m}", p)) for n, m, p in product(layers, numbers[::2], parts)]
    names = ModuleNames(own)
    for layer, number, part in product(layers, numbers, parts):
        name = f"layers.{layer}.mlp.experts.{number}.{part}"
        assert names.alike(f"backbone.{name}") == ([] if number % 2 else [name])
