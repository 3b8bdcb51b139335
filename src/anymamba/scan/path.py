"""Which algorithm computes a scan, with what chunk length, and along which pathway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

Algorithm = Literal["fastest", "recurrent", "minimal", "serial", "serial_recalculated", "fused"]
Pathway = Literal["single", "double"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_MAX_CHUNK_LEN = 2**31 - 1


@runtime_checkable
class ScanDims(Protocol):
    """The sizes of a block's scan, which every block of the library has."""

    @property
    def d_state(self) -> int:
        """Return the state size n."""

    @property
    def headdim(self) -> int:
        """Return the head width p."""

    @property
    def rank(self) -> int:
        """Return the MIMO rank r, 1 for SISO."""


@dataclass(frozen=True)
class SsdPath:
    """An algorithm for a scan and, optionally, its chunk length and pathway.

    All algorithms give the same values and gradients; they differ in time and memory.

    - `fastest` (the default): `fused` where a kernel covers the inputs, else `serial_recalculated`, and for a single
      step `recurrent`.
    - `recurrent`: one step after the other. The definition itself, slow on long inputs.
    - `minimal`: segment-sum masks and batched matmuls, backward by autograd. Quadratic in the number of chunks.
    - `serial`: five batched stages with a loop over chunks for the state, backward by autograd.
    - `serial_recalculated`: one chunk at a time, or on devices other than a CPU, as many chunks at once as 1 GiB holds;
      the backward is derived by hand, keeps the inputs only and recomputes the rest.
    - `fused`: `serial_recalculated` in the compiled kernels, if there are any for the device and dtype.

    Without a chunk length, the scan chooses one when it runs that suits the algorithm, the sizes and the device. Any
    length from 1 is valid, even one longer than the sequence. `recurrent` has no chunks and ignores it.

    Mamba-3's trapezoidal rule has two pathways on any algorithm, `single` (one scan) and `double` (two scans); others
    ignore it, and the kernels need neither. Both leave the same state, so a sequence may change its pathway at any cut.
    """

    algorithm: Algorithm = "fastest"
    chunk_len: int | None = None
    pathway: Pathway = "single"

    def __post_init__(self) -> None:
        """Reject unknown names and impossible lengths."""
        for name, known in (("algorithm", Algorithm), ("pathway", Pathway)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ValueError(f"SsdPath: {name} must be one of {get_args(known)}, got {value!r}")
        if self.chunk_len is None:
            return
        if not isinstance(self.chunk_len, int) or isinstance(self.chunk_len, bool):
            raise TypeError(f"SsdPath: chunk_len must be None or an integer, got {self.chunk_len!r}")
        if not 1 <= self.chunk_len <= _MAX_CHUNK_LEN:
            raise ValueError(f"SsdPath: chunk_len must be None or from 1 to {_MAX_CHUNK_LEN}, got {self.chunk_len}")

    @staticmethod
    def or_default(path: SsdPath | None) -> SsdPath:
        """Return `path`, or the default path if it is None; raise `TypeError` for anything else."""
        if path is not None and not isinstance(path, SsdPath):
            raise TypeError(f"path must be an SsdPath, such as SsdPath.minimal(), got {path!r}")
        return path or SsdPath()

    @classmethod
    def recurrent(cls, *, pathway: Pathway = "single") -> SsdPath:
        """Return the path that computes one step after the other."""
        return cls("recurrent", pathway=pathway)

    @classmethod
    def minimal(cls, chunk_len: int | None = None, *, pathway: Pathway = "single") -> SsdPath:
        """Return the path of segment-sum masks and batched matmuls, backward by autograd."""
        return cls("minimal", chunk_len, pathway)

    @classmethod
    def serial(cls, chunk_len: int | None = None, *, pathway: Pathway = "single") -> SsdPath:
        """Return the path of five batched stages, backward by autograd."""
        return cls("serial", chunk_len, pathway)

    @classmethod
    def serial_recalculated(cls, chunk_len: int | None = None, *, pathway: Pathway = "single") -> SsdPath:
        """Return the path of one chunk at a time, with the hand-derived backward that keeps the inputs only."""
        return cls("serial_recalculated", chunk_len, pathway)

    @classmethod
    def fused(cls, chunk_len: int | None = None, *, pathway: Pathway = "single") -> SsdPath:
        """Return the path of the compiled kernels; the scan raises `RuntimeError` if there are none."""
        return cls("fused", chunk_len, pathway)

    @classmethod
    def for_block(cls, block: ScanDims, algorithm: Algorithm = "fastest", *, pathway: Pathway = "single") -> SsdPath:
        """Return the path of an algorithm with the chunk length that suits `block`, unless the kernels choose it."""
        if algorithm in ("fastest", "fused", "recurrent"):
            return cls(algorithm, pathway=pathway)
        return cls(algorithm, cls.optimal_chunk_len(block.d_state, block.headdim, block.rank), pathway)

    @staticmethod
    def optimal_chunk_len(d_state: int, headdim: int, rank: int = 1) -> int:
        """Return about √(d_state·headdim), rounded up to a multiple of 32, at most 512.

        With MIMO the l·r rows of a chunk are fused into one matrix, so that length is divided by the rank.
        """
        fused_len = min(512, 32 * math.ceil(math.isqrt(d_state * headdim) / 32))
        return max(1, fused_len // rank)

    def chunk_len_or_optimal(self, d_state: int, headdim: int, rank: int = 1) -> int:
        """Return this path's chunk length, or if it has none, the one that suits the portable algorithms."""
        return self.chunk_len or self.optimal_chunk_len(d_state, headdim, rank)
