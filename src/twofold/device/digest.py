"""Digests by which two workers tell that they run the same weights and the same tokenizer.

A digest is over the names, sizes and contents of files. Files up to `_WHOLE_BYTES` are hashed
whole. Of longer ones the first and last MiB (in safetensors and GGUF the header, with every
tensor's name, type and shape, comes first) and 4 KiB of every MiB are: enough to tell any two
models or fine-tunes apart, at a cost of milliseconds per gigabyte. It is a check against mixing
models up, not against someone who crafts a file to pass for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_MIB: Final = 1 << 20
_WHOLE_BYTES: Final = 16 * _MIB
_SAMPLE_BYTES: Final = 4096
_HEX_DIGITS: Final = 32


def digest_files(paths: Iterable[Path]) -> str:
    """Hex SHA-256 prefix over `paths`, whatever their order. Raises OSError."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        total.update(_digest_file(path))
    return total.hexdigest()[:_HEX_DIGITS]


def _digest_file(path: Path) -> bytes:
    size = path.stat().st_size
    content = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            content.update(file.read())
            return content.digest()
        content.update(file.read(_MIB))
        for offset in range(_MIB, size - _MIB, _MIB):
            file.seek(offset)
            content.update(file.read(_SAMPLE_BYTES))
        file.seek(size - _MIB)
        content.update(file.read())
    return content.digest()
