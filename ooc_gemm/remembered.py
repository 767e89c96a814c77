"""What was measured once on this machine, kept as JSON beside the cubins and read anew each time."""

import json
from typing import Any

from .nvrtc import _cache_dir, replace_file


def recall(name: str) -> dict[str, dict[str, Any]]:
    """What the file `name` holds; nothing where it is missing or damaged."""
    try:
        found = json.loads((_cache_dir() / name).read_text(encoding="utf-8"))
        return found if all(isinstance(entry, dict) for entry in found.values()) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def remember(name: str, device: str, values: dict[str, Any]) -> None:
    """Add `values` to what `name` holds for a device. Raises OSError."""
    found = recall(name)
    found.setdefault(device, {}).update(values)
    replace_file(_cache_dir() / name, json.dumps(found, indent=1).encode())
