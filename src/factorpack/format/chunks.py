"""Large blocks of symbols <-> pcodec chunks, which decode ten times as fast as a message's words.

A chunk has its own table and takes about 30 bytes more than a message with ours, so small blocks stay in
the message. docs/format.md gives the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

from factorpack.errors import FormatError
from factorpack.format.symbols import Data, Symbols, SymbolType

LENGTH = struct.Struct("<I")
"""The lengths of all chunks come before the tables."""
_VERSION = bytes([4, 1])
"""Of the chunks' format; readers know no other."""
_LEVEL = 10
"""From 0 to 12: finer tables than the default of 8, and as fast to decode."""
_CLASSIC = b"\0"
"""First byte of a chunk that holds the values themselves, not multiples or differences."""
FEWEST = 2048
"""Codes of the smallest block for which a chunk's table can pay."""
_MOST = 1 << 24
"""Values that one pcodec chunk can hold; a larger block becomes several, one after the other."""
_MOST_TABLE = 1 << 18
"""More bytes than any chunk's table takes: 2^15 bins of at most 36 bits."""
_WORTH_A_THREAD = 1 << 17
"""Codes of a block that take a thread about a millisecond."""
_MOST_BYTES = 256**LENGTH.size - 1


def compress_blocks(blocks: Sequence[Symbols], pool: Executor | None = None) -> list[bytes | None]:
    """The chunk of each block. A pool compresses those that are worth a thread at the same time."""
    if pool is None or sum(len(block) >= _WORTH_A_THREAD for block in blocks) < 2:
        return [compress_block(block) for block in blocks]
    return list(pool.map(compress_block, blocks))


def compress_block(block: Symbols) -> bytes | None:
    """Table and values of one block, (n,), or None where a chunk cannot pay or would be too long."""
    if len(block) < FEWEST:
        return None
    chunk = b"".join(_compress_run(block[start : start + _MOST]) for start in range(0, len(block), _MOST))
    return chunk if len(chunk) <= _MOST_BYTES else None


def _compress_run(block: Symbols) -> bytes:
    settings = ChunkConfig(
        compression_level=_LEVEL,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([len(block)]),
        enable_8_bit=True,
    )
    chunk = wrapped.FileCompressor().chunk_compressor(block, settings)
    return bytes(chunk.write_meta() + chunk.write_page(0))


def join_chunks(chunks: Sequence[bytes]) -> bytes:
    """The end of a stream: nothing, or the version of the chunks' format and the chunks."""
    return b"".join([_VERSION, *chunks]) if chunks else b""


def joined_chunk_bytes(lengths: Sequence[int]) -> int:
    return len(_VERSION) + sum(lengths) if lengths else 0


class Chunks:
    """The blocks of joined chunks of known lengths, starting at `start`; the bytes are untrusted."""

    def __init__(self, data: Data, start: int, lengths: Sequence[int]) -> None:
        self._data, self._lengths = data, iter(lengths)
        self._at = start + len(_VERSION)
        if lengths:
            found = bytes(data[start : self._at])
            if found != _VERSION:
                raise FormatError(
                    f"the chunks have another version: {list(found)}, expected {list(_VERSION)}"
                )
            self._reader, _ = wrapped.FileDecompressor.new(found)

    def next(self, count: int, dtype: SymbolType) -> Symbols:
        length = next(self._lengths)
        chunk = self._data[self._at : self._at + length]
        self._at += length
        block: Symbols = np.zeros(count, dtype)
        for start in range(0, count, _MOST):
            chunk = self._read(chunk, block[start : start + _MOST])
        if chunk:
            raise FormatError(f"a chunk of {length} bytes has {len(chunk)} too many")
        return block

    def _read(self, chunk: Data, block: Symbols) -> Data:
        """Fills a block of at most `_MOST`, and returns the bytes after it."""
        if bytes(chunk[:1]) != _CLASSIC:
            raise FormatError("a chunk does not hold plain values")
        try:
            # pcodec takes bytes alone. No table is longer than the first piece, and what follows it is copied once.
            head = bytes(chunk[:_MOST_TABLE])
            read, taken = self._reader.chunk_decompressor(head, f"u{8 * block.itemsize}")
            page = chunk[taken:]
            _, used = read.read_page_into(bytes(page), len(block), block)
        except RuntimeError as error:
            raise FormatError(f"a chunk of {len(chunk)} bytes cannot be read: {error}") from error
        return page[used:]
