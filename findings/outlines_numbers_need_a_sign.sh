#!/usr/bin/env bash
# outlines-core 0.2.14.
#
# Guess: the expression that outlines-core makes of a JSON schema matches every number of the JSON standard.
#
# Behaviour: an exponent must have a sign. 1e5, which json.dumps and most models write, does not match.
#
# Seen: 1e+5 matches, 1e5 does not.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check outlines-core==0.2.14
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import re

from outlines_core.json_schema import build_regex_from_schema

expression = build_regex_from_schema("{\"type\": \"number\"}")
found = {text: bool(re.fullmatch(expression, text)) for text in ("1e+5", "1e-5", "1e5", "1.5")}
print(found)
assert found == {"1e+5": True, "1e-5": True, "1e5": False, "1.5": True}, found
PYTHON
