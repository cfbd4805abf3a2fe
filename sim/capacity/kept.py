"""What was found once, kept in a file under a hash of all that it follows from. A file that is not whole, or
not as it was written, counts as none."""

import hashlib
import json
from pathlib import Path
from typing import Any

from policies.core.errors import InputError
from policies.process.documents import read_json
from results.files import user_file


def place(folder: Path, *follows_from: object) -> Path:
    """The file in `folder` of what follows from these."""
    text = " ".join(map(str, follows_from))
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def keep(path: Path, found: dict[str, Any]) -> None:
    text = json.dumps({"sha256": _digest(found), "found": found}, indent=1)
    with user_file(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def kept(path: Path) -> dict[str, Any] | None:
    try:
        raw = read_json(path, "what a search has kept")
        found = raw["found"]
        return found if isinstance(found, dict) and raw["sha256"] == _digest(found) else None
    except (InputError, KeyError, TypeError):
        return None


def _digest(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
