"""Read one GGUF file: typed metadata values and tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spire.errors import CheckpointError
from spire.model.directory import refuse_stand_in

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURE = "llama"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_REQUIRED: Final[Any] = object()
_KINDS: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class GgufFile:
    """A GGUF file's metadata by key and tensors by name. Raises CheckpointError, naming file and key, if unusable."""

    def __init__(self, path: Path):
        self.path = path
        reader = _open(path)
        self.fields, self.read = reader.fields, set[str]()  # all keys, and the keys that were requested
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if (parts := self.whole("split.count", 0)) > 1:
            raise self.error(f"part of a model in {parts} files: join them with llama-gguf-split --merge")
        if (kind := self.text("general.type", "model")) != "model":
            raise self.error(f"holds no model: general.type is {kind!r}")
        if (architecture := self.text("general.architecture")) != ARCHITECTURE:
            raise self.error(
                f"the architecture is {architecture!r}; only {ARCHITECTURE!r} is converted: take the model in Hugging "
                "Face layout, of which docs/models.md lists the families"
            )
        if not self.tensors:
            raise self.error("holds a vocabulary and no weights")

    def text(self, key: str, default: str = _REQUIRED) -> str:
        return self._checked(key, self.value(key, default), str)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        return self._checked(key, self.value(key, default), bool)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        return self._checked(key, self.value(key, default), float)

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the integer at `key`. A value that is a list with an integer per layer must have equal integers."""
        value = self.value(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        elif isinstance(value, list):
            raise self.error(f"{key} differs from layer to layer, which no Llama of ours can: {value[:8]}")
        return value if value is None else self._checked(key, value, int)

    def list(self, key: str, kind: type, default: list[Any] | None = _REQUIRED) -> list[Any]:
        values = self.value(key, default)
        if not isinstance(values, list):
            raise self.error(f"{key} is {_shown(values)}, not a list")
        return [self._checked(key, value, kind) for value in values]

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the metadata value of `key`, of any type, or `default`. Raises CheckpointError without either."""
        self.read.add(key)
        if key in self.fields:
            return self.fields[key].contents()
        if default is _REQUIRED:
            raise self.error(f"{key} is missing: the file is incomplete")
        return default

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _checked(self, key: str, value: Any, kind: type) -> Any:
        truth = isinstance(value, bool)
        fits = truth if kind is bool else isinstance(value, (int, float) if kind is float else kind) and not truth
        if not fits:
            raise self.error(f"{key} is {_shown(value)}, not {_KINDS[kind]}")
        return kind(value)


def _open(path: Path) -> Any:
    """Open a GGUF file and return its GGUFReader. Raises CheckpointError for damaged files and other formats."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file: convert gguf takes one .gguf file")
    refuse_stand_in(path)
    with path.open("rb") as opened:
        head = opened.read(24)
    if not head.startswith(b"GGUF"):
        raise CheckpointError(f"{path} is no GGUF file: it begins with {head[:4]!r}")
    if len(head) == 24 and not int.from_bytes(head[4:6], "little"):
        raise CheckpointError(f"{path} is a big-endian GGUF file: only little-endian ones are read")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package: pip install 'spire-serve[gguf]'") from error
    try:
        return GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a damaged file makes the library raise all kinds of errors
        part = _PART.search(path.name)
        why = f"part of a model in {int(part[1])} files?" if part else "truncated or damaged"
        raise CheckpointError(f"{path} is no whole GGUF file ({_shown(error)}): {why}") from error


def _shown(value: Any) -> str:
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
