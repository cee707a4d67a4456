#!/usr/bin/env bash
# pypdfium2 5.15.2, PdfDocument and PdfiumError.err_code.
#
# Guess: each document that fails to load sets the code of its own fault.
#
# Behaviour: a document whose tree says 0 pages fails, and sets no code. The error then has the code of the load before it: "Success"
# in a new process, and that of a missing password behind a locked document. Who tells users why a PDF is refused cannot go
# by the code alone.
#
# Seen: codes 0, 4, 4 for an empty document, a locked one, and the empty one again.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pypdfium2==5.15.2
cat > "$folder/check.py" <<'PYTHON'
import pypdfium2


def pdf(trailer: str, kids: str, *more: str) -> bytes:
    pages = f"<</Type/Pages/Kids[{kids}]/Count {1 if kids else 0}>>"
    objects = ["<</Type/Catalog/Pages 2 0 R>>", pages, "<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>", *more]
    text, places = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(text))
        text += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"trailer<</Size {size}/Root 1 0 R{trailer}>>\nstartxref\n{len(text)}\n%%EOF"
    return f"{text}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode()


key = "A" * 64
empty = pdf("", "")
locked = pdf("/Encrypt 4 0 R/ID[<00><00>]", "3 0 R", f"<</Filter/Standard/V 1/R 2/O<{key}>/U<{key}>/P -4>>")
codes = []
for data in (empty, locked, empty):
    try:
        pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        codes.append(error.err_code)
print("codes", codes)
assert codes == [0, 4, 4]
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
