"""Codes <-> bytes by asymmetric numeral systems, with a fitted model for each group of rows.

Rows of a latent have distributions of different widths. Rows that look alike share one model: the
number of groups is the one that makes model plus message shortest. docs/format.md gives the layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format.bitpack import pack, packed_bytes, unpack

TOTAL_BITS = 12
TOTAL = 1 << TOTAL_BITS
"""Frequencies of a model sum to this."""
MAX_GROUPS = 32
_HEADER = struct.Struct("<bBB")  # lowest code, alphabet size - 1, groups - 1

Codes = NDArray[np.signedinteger]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Grouping:
    """Which model each row uses, (r,), and the models' frequencies, (g, symbols)."""

    group_of: NDArray[np.int64]
    frequencies: Counts


def encode(codes: Codes) -> bytes:
    """Entropy codes a matrix of at least one code, (r, n)."""
    low = int(codes.min())
    symbols = codes.astype(np.int32) - low
    alphabet = int(symbols.max()) + 1
    grouping = _best_grouping(_histograms(symbols, alphabet))
    groups = len(grouping.frequencies)
    coder = constriction.stream.stack.AnsCoder()
    for group in reversed(range(groups)):
        model = _model(grouping.frequencies[group])
        coder.encode_reverse(symbols[grouping.group_of == group].ravel(), model)
    width = _index_width(groups)
    return b"".join(
        [
            _HEADER.pack(low, alphabet - 1, groups - 1),
            pack(grouping.group_of.astype(np.uint16), width) if width else b"",
            pack(grouping.frequencies[:, 1:].astype(np.uint16).ravel(), TOTAL_BITS + 1),
            coder.get_compressed().astype("<u4").tobytes(),
        ]
    )


def decode(data: bytes, rows: int, columns: int) -> Codes:
    """The inverse of `encode`."""
    if len(data) < _HEADER.size:
        raise FormatError(f"an entropy-coded stream of {len(data)} bytes has no header")
    low, alphabet, groups = _HEADER.unpack_from(data)
    alphabet, groups = alphabet + 1, groups + 1
    if groups > MAX_GROUPS or low + alphabet > 128:
        raise FormatError(f"{groups} models for codes {low} to {low + alphabet - 1}")
    width = _index_width(groups)
    index_end = _HEADER.size + packed_bytes(rows, width)
    table_end = index_end + packed_bytes(groups * (alphabet - 1), TOTAL_BITS + 1)
    if len(data) < table_end or (len(data) - table_end) % 4:
        raise FormatError(f"an entropy-coded stream of {len(data)} bytes is cut short")
    index = unpack(data[_HEADER.size : index_end], rows, width) if width else np.zeros(rows, np.uint16)
    frequencies = _read_tables(data[index_end:table_end], groups, alphabet)
    if index.size and int(index.max()) >= groups:
        raise FormatError(f"a row uses model {int(index.max())} of {groups}")
    words = np.frombuffer(data, "<u4", offset=table_end).astype(np.uint32)
    return _decode_words(words, index, frequencies, low, columns)


def _decode_words(
    words: NDArray[np.uint32], index: NDArray[np.uint16], frequencies: Counts, low: int, columns: int
) -> Codes:
    try:
        coder = constriction.stream.stack.AnsCoder(words)
    except ValueError as error:
        raise FormatError("an entropy-coded message ends in a zero word") from error
    codes = np.empty((len(index), columns), np.int8)
    for group, frequency in enumerate(frequencies):
        rows = np.flatnonzero(index == group)
        symbols = coder.decode(_model(frequency), len(rows) * columns)
        if len(frequency) == 1 and symbols.any():
            raise FormatError("an entropy-coded message holds a code that its model lacks")
        codes[rows] = (symbols + low).astype(np.int8).reshape(len(rows), columns)
    if not coder.is_empty():
        raise FormatError("an entropy-coded message is longer than its codes")
    return codes


def _read_tables(data: bytes, groups: int, alphabet: int) -> Counts:
    tail = unpack(data, groups * (alphabet - 1), TOTAL_BITS + 1).reshape(groups, alphabet - 1)
    first = TOTAL - tail.astype(np.int64).sum(1, keepdims=True)
    if (first < 0).any():
        raise FormatError(f"the frequencies of an entropy model exceed {TOTAL}")
    return np.concatenate([first, tail], axis=1)


def _model(frequencies: Counts) -> object:
    """constriction's categorical model: symbol i starts at floor(F_i (2^24 - m) / 2^12) + i of 2^24.

    F_i is the sum of the frequencies before symbol i, m the alphabet's size. All of it is exact in
    float64, so the model is the same on every machine.
    """
    if len(frequencies) == 1:  # constriction wants two symbols; the second gets 2^-24 of the range
        frequencies = np.array([TOTAL, 0])
    return constriction.stream.model.Categorical(frequencies.astype(np.float64), perfect=False)


def _index_width(groups: int) -> int:
    return int(groups - 1).bit_length()


def _histograms(symbols: NDArray[np.int32], alphabet: int) -> Counts:
    rows = symbols.shape[0]
    flat = symbols + (np.arange(rows, dtype=np.int64) * alphabet)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * alphabet).reshape(rows, alphabet)


def _best_grouping(histograms: Counts) -> _Grouping:
    """Doubles the number of groups for as long as the whole stream gets shorter."""
    best, groups = _group(histograms, 1), 2
    best_bits = _stream_bits(histograms, best)
    while groups <= min(MAX_GROUPS, len(histograms)):
        grouping = _group(histograms, groups)
        bits = _stream_bits(histograms, grouping)
        if bits >= best_bits:
            break
        best, best_bits, groups = grouping, bits, groups * 2
    return best


def _stream_bits(histograms: Counts, grouping: _Grouping) -> float:
    return _message_bits(histograms, grouping) + _side_bits(histograms, len(grouping.frequencies))


def _side_bits(histograms: Counts, groups: int) -> int:
    rows, alphabet = histograms.shape
    return int(rows) * _index_width(groups) + groups * (int(alphabet) - 1) * (TOTAL_BITS + 1)


def _message_bits(histograms: Counts, grouping: _Grouping) -> float:
    lengths = _code_lengths(grouping.frequencies)
    return float((histograms * lengths[grouping.group_of]).sum())


def _code_lengths(frequencies: Counts) -> NDArray[np.float64]:
    """Bits a symbol: the model leaves every symbol at least 2^-24."""
    return -np.log2(np.maximum(frequencies / TOTAL, 2.0**-24))


def _group(histograms: Counts, groups: int, rounds: int = 8) -> _Grouping:
    """Lloyd's algorithm on code lengths: each row joins the model that codes it shortest."""
    order = np.argsort(_row_bits(histograms), kind="stable")
    group_of = np.empty(len(histograms), np.int64)
    group_of[order] = np.arange(len(order)) * groups // len(order)
    frequencies = _fit(histograms, group_of, groups)
    for _ in range(rounds if groups > 1 else 0):
        moved = (histograms @ _code_lengths(frequencies).T).argmin(1)
        if (moved == group_of).all():
            break
        group_of, frequencies = moved, _fit(histograms, moved, groups)
    return _Grouping(group_of, frequencies)


def _row_bits(histograms: Counts) -> NDArray[np.float64]:
    """Empirical code length of each row under its own histogram."""
    share = histograms / np.maximum(histograms.sum(1, keepdims=True), 1)
    bits: NDArray[np.float64] = -(histograms * np.log2(np.maximum(share, 1e-12))).sum(1)
    return bits


def _fit(histograms: Counts, group_of: NDArray[np.int64], groups: int) -> Counts:
    """Frequencies of each group: its counts scaled to sum to TOTAL, none that occurs below one."""
    counts = np.zeros((groups, histograms.shape[1]), np.int64)
    np.add.at(counts, group_of, histograms)
    return np.stack([_normalize(row) for row in counts])


def _normalize(counts: Counts) -> Counts:
    total = int(counts.sum())
    if total == 0:
        counts, total = np.ones_like(counts), len(counts)
    occurs = counts > 0
    frequencies = np.where(occurs, 1 + counts * (TOTAL - int(occurs.sum())) // total, 0)
    # What rounding left over goes to the most frequent symbol, where it costs least.
    frequencies[int(counts.argmax())] += TOTAL - int(frequencies.sum())
    return frequencies
