"""The tensors of a packed model, in memory or in their file: what each one is, its codes, or its stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from factorpack.decoding import specs
from factorpack.format.container import Reader, stored
from factorpack.format.encode_ahead import Stored, Streams
from factorpack.format.read_ahead import read_ahead
from factorpack.kinds.base import PartSpec
from factorpack.record import Encoded


class TensorSource:
    """Decodes nothing that is not asked for."""

    def __init__(self, tensors: Mapping[str, Encoded], streams: Streams | None = None) -> None:
        self._tensors, self._streams = tensors, streams or Streams()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def kind(self, name: str) -> str:
        found = self._tensors
        return found.rows[name].kind if isinstance(found, Reader) else found[name].kind

    def specs(self, name: str) -> Mapping[str, PartSpec]:
        """Shape, type and width of each part."""
        found = self._tensors
        return found.rows[name].specs if isinstance(found, Reader) else specs(found[name])

    def stored_bytes(self, name: str) -> int:
        """Bytes of the stream. A tensor that is not in a file yet is encoded to know them."""
        if isinstance(self._tensors, Reader):
            return self._tensors.rows[name].stored_bytes
        return self.stream(name)[0].stored_bytes

    def stream(self, name: str) -> Stored:
        """A tensor's row of the schema, and its bytes in the file: see `container.read_row`."""
        if isinstance(self._tensors, Reader):
            return self._tensors.rows[name], self._tensors.stream(name).tobytes()
        encoded = self._tensors[name]
        found = self._streams.find(name, encoded)
        if found is None:
            found = stored(name, encoded)
            self._streams.keep(name, encoded, found)
        return found

    def read(self, name: str) -> Encoded:
        """One tensor, decoded if it is in a file."""
        return self._tensors[name]

    def decoded(self, names: Sequence[str]) -> Iterable[tuple[str, Encoded]]:
        """Tensors in this order; those in a file are decoded ahead by threads."""
        if isinstance(self._tensors, Reader):
            return read_ahead(self._tensors, torch.get_num_threads(), names)
        return ((name, self._tensors[name]) for name in names)
