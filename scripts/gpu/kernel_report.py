"""Writes the ledger of the kernels: which tests prove them, how they are compiled for each card, what a card took."""

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.ops.triton.arch import ARCHES
from quire.ops.triton.binaries import Binary
from quire.ops.triton.build import build_fitting
from quire.ops.triton.jobs import cache_folder
from quire.ops.triton.machine_code import inspect_code
from quire.ops.triton.variants import Variant, all_variants, some_of_each

ROOT = Path(__file__).parents[2]
TESTS = Path("tests/ops/triton")
TELLING = ("HGMMA", "UTCHMMA", "HMMA", "LDG.E.128", "LDGSTS.E.BYPASS.128", "UTMALDG", "I2F")
"""Instructions that the page names: products of tensor cores, wide loads, conversions."""
HEAD = """# GPU kernels

What is known of each Triton kernel. `scripts/kernel_report` writes this page, and `kernels.json` with every variant; it
needs no card. A blank says that nobody has looked.

"Proven by" names the tests that compare a kernel with plain torch in Triton's interpreter, which shows its arithmetic
and neither its speed nor races between programs. Registers are of a thread. Programs are those that a multiprocessor
holds at once. The range is over the variants that were compiled, a part of each kernel's where its list is long.
"""


class Row(NamedTuple):
    """A variant, compiled for a card at a `commit`; `fault` says why it is not."""

    kernel: str
    file: str
    variant: str
    reason: str
    arch: str
    triton: str = ""
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    programs: int | None = None
    instructions: dict[str, int] | None = None
    fault: str = ""
    commit: str = ""


class Ledger(NamedTuple):
    """What is known.

    Attributes:
        rows: of all variants that were compiled.
        figures: of operations, as `figures_of` returns them.
    """

    rows: list[Row]
    figures: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """Reads the ledger that an earlier run wrote; an empty one if there is none."""
        if not path.exists():
            return cls([], [])
        known = json.loads(path.read_text())
        return cls([Row(**row) for row in known["compiled"]], known["measured"])

    def updated(self, new: "Ledger") -> "Ledger":
        """Returns the new rows and figures, and of the old ones those of other cards and of other operations."""
        cards, cases = {row.arch for row in new.rows}, {_case(figure) for figure in new.figures}
        rows = [*new.rows, *(row for row in self.rows if row.arch not in cards)]
        kept = [figure for figure in self.figures if _case(figure) not in cases]
        return Ledger(sorted(rows, key=lambda row: list(ARCHES).index(row.arch)), [*kept, *new.figures])


def _case(figure: dict[str, Any]) -> tuple[str, str, str]:
    return figure["card"], figure["kernel"], figure["case"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--arch", choices=ARCHES, action="append", help="A card; may be repeated (default: all). Others stay."
    )
    parser.add_argument("--most", type=int, help="The most variants of a kernel to compile (default: all).")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="Files of figures that gpu_check wrote.")
    parser.add_argument("--folder", type=Path, default=cache_folder(), help="Of compiled kernels (%(default)s).")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="Folder of the page (%(default)s).")
    args = parser.parse_args()
    variants = all_variants() if args.most is None else some_of_each(all_variants(), args.most)
    rows = [row for arch in args.arch or ARCHES for row in compile_for(arch, variants, args.folder)]
    path, new = args.output / "kernels.json", Ledger(rows, [each for path in args.results for each in figures_of(path)])
    ledger = Ledger.read(path).updated(new)
    compiled = [row._asdict() for row in ledger.rows]
    path.write_text(json.dumps({"compiled": compiled, "measured": ledger.figures}, indent=1) + "\n")
    path.with_suffix(".md").write_text(page_of(*ledger))


def compile_for(arch: str, variants: Sequence[Variant], folder: Path) -> list[Row]:
    """Compiles variants and looks at their machine code; on AMD's cards, only whether they compile."""
    rows, commit = [], _commit()
    for variant, binary in zip(variants, build_fitting(variants, arch, folder)[0], strict=True):
        kernel = variant.kernel
        file, form = kernel.module.rpartition(".")[2], str(variant.specialization)
        row = Row(kernel.name, file, form, variant.reason, arch, commit=commit)
        if not isinstance(binary, Binary):
            rows.append(row._replace(fault=str(binary)))
            continue
        row = row._replace(triton=binary.triton, shared_bytes=binary.shared_bytes)
        if ARCHES[arch].backend == "cuda":
            code = inspect_code(folder, binary)
            row = row._replace(
                registers=code.num_registers, stack_bytes=code.stack_bytes, shared_bytes=code.shared_bytes,
                programs=code.programs_per_processor, instructions=code.instructions,
            )  # fmt: skip
        rows.append(row)
    return rows


def _commit() -> str:
    """The short hash of the tree's commit; empty without git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def figures_of(path: Path) -> list[dict[str, Any]]:
    """The figures of operations in a file of gpu_check, each with the card that its ceilings name."""
    card, figures = "", []
    for line in path.read_text().splitlines():
        figure = json.loads(line)
        card = figure.get("ceilings", {}).get("card", card)
        if "kernel" in figure and "us" in figure:
            figures.append({"card": card, **figure})
    return figures


def page_of(rows: Sequence[Row], figures: Sequence[dict[str, Any]]) -> str:
    lines = [HEAD]
    for arch in dict.fromkeys(row.arch for row in rows):
        own = [row for row in rows if row.arch == arch]
        compilers = ", ".join(sorted({row.triton for row in own if row.triton}))
        commits = ", ".join(sorted({row.commit for row in own if row.commit}))
        lines += [f"## Compiled for {arch}, by Triton {compilers}{commits and f', at {commits}'}\n"]
        lines += ["| kernel | proven by | variants | registers | spilled bytes | shared kB | programs | instructions |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [
            _line([row for row in own if row.kernel == name]) for name in dict.fromkeys(row.kernel for row in own)
        ]
        lines += [f"\n`{row.kernel}` {row.variant}: {row.fault}" for row in own if row.fault]
        lines += [""]
    lines += ["## Measured\n"]
    if not figures:
        lines += ["No figures yet."]
    else:
        lines += ["| operation | case | card | commit | µs | share of the floor |", "|---|---|---|---|---|---|"]
    for each in figures:
        share = f"{100 * each['floor_us'] / each['us']:.0f} %"
        cells = (each["kernel"], each["case"], each["card"], each.get("commit", ""), f"{each['us']:.1f}", share)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tests_of(file: str) -> list[Path]:
    """The tests of a file of kernels; without any, those of the files that import it."""
    own = TESTS / f"test_{file}.py"
    if (ROOT / own).exists():
        return [own]
    sources = sorted((ROOT / "ops/triton").glob("*.py"))
    imports = re.compile(rf"from quire\.ops\.triton(\.{file} import|\ import .*\b{file}\b)")
    using = [path.stem for path in sources if imports.search(path.read_text())]
    direct = [path for path in (TESTS / f"test_{each}.py" for each in using) if (ROOT / path).exists()]
    return direct or list(dict.fromkeys(path for each in using for path in tests_of(each)))


def _line(rows: Sequence[Row]) -> str:
    """The line of a kernel's variants on one card."""
    good = [row for row in rows if not row.fault]
    counts = {name: [(row.instructions or {}).get(name, 0) for row in good] for name in TELLING}
    instructions = ", ".join(f"{name} {_range(each)}" for name, each in counts.items() if any(each))
    cells = [
        f"`{rows[0].kernel}`",
        ", ".join(f"`{path}`" for path in tests_of(rows[0].file)),
        f"{len(good)}" if len(good) == len(rows) else f"{len(good)} of {len(rows)}",
        _range(row.registers for row in good),
        _range(row.stack_bytes for row in good),
        _range(None if row.shared_bytes is None else -(-row.shared_bytes // 1024) for row in good),
        _range(row.programs for row in good),
        instructions,
    ]
    return f"| {' | '.join(cells)} |"


def _range(values: Iterable[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    return "" if not known else f"{known[0]}" if len(known) == 1 else f"{known[0]}–{known[-1]}"


if __name__ == "__main__":
    main()
