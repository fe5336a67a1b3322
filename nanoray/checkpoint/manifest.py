"""manifest.json of a checkpoint: bytes and sha256 of each of its files. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 2
STEP_NAME = re.compile(r"step_(\d{8,})")
Sums = dict[str, dict[str, Any]]  # bytes and sha256 of each file


class Damage(Exception):
    """Why a folder is not a valid checkpoint: "FILE: reason"."""


def manifest_json(sums: Sums) -> bytes:
    """Return the bytes of a manifest."""
    return json.dumps({"format": FORMAT, "files": sums}, indent=1).encode()


def parse_manifest(raw: bytes) -> Sums:
    """Return the sums of a manifest. Raises Damage, also for those of another format.

    It has no checksum of its own: written anew, it must have the same bytes.
    """
    try:
        sums = {}
        for name, entry in json.loads(raw)["files"].items():
            # A name with a folder would be written outside of the checkpoint.
            if PurePosixPath(name).name != name:
                raise ValueError(name)
            sums[name] = {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
        if manifest_json(sums) != raw:
            raise ValueError("not byte for byte what these sums give")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Damage(f"{MANIFEST}: not as nanoray writes it") from None
    return sums
