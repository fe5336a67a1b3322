"""Sets globals of the script that executes it, from words such as --steps=3."""

import sys
from ast import literal_eval

for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    assert key in globals(), key
    globals()[key] = literal_eval(value)
