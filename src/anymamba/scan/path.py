"""Which algorithm computes the scan, with what chunk length, and on which pathway Mamba-3 calls it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

Algorithm = Literal["fastest", "recurrent", "minimal", "serial", "serial_recalculated", "fused"]
Pathway = Literal["single", "double"]

# Steps times ranks of a chunk in the compiled kernels: the fastest of 32, 48, 64, 96 at heads of 64 and a state of 128.
FUSED_CHUNK_ROWS = 64
_LONGEST = 2**31 - 1


@runtime_checkable
class ScanDims(Protocol):
    """What a block tells of its scan: every block of the library has these three."""

    @property
    def d_state(self) -> int:
        """State size n."""

    @property
    def headdim(self) -> int:
        """Head width p."""

    @property
    def rank(self) -> int:
        """MIMO rank r, 1 for SISO."""


@dataclass(frozen=True)
class SsdPath:
    """An algorithm for the scan and, optionally, its chunk length and the pathway of Mamba-3.

    All algorithms give the same values and gradients; they differ in time and memory.

    - `fastest` (the default): `fused` where a kernel covers the inputs, else `serial_recalculated`.
    - `recurrent`: one step after the other. The definition itself, slow on long inputs.
    - `minimal`: segment-sum masks and batched matmuls, backward by autograd. Quadratic in the number of chunks.
    - `serial`: five batched stages with a loop over chunks for the state, backward by autograd.
    - `serial_recalculated`: one chunk at a time; the backward is derived by hand, keeps the inputs only and recomputes
      the rest.
    - `fused`: the same in the compiled kernels, where there are some for the device and dtype.

    No chunk length means the one that suits the algorithm and the sizes at hand. Any length from 1 upwards is valid,
    also one beyond the sequence. `recurrent` has no chunks and ignores it.

    The pathway is how Mamba-3 computes its trapezoidal rule: `single` with one scan, `double` with two. Both leave the
    same state, so that it may change from call to call. Everything else ignores it.
    """

    algorithm: Algorithm = "fastest"
    chunk_len: int | None = None
    pathway: Pathway = "single"

    def __post_init__(self) -> None:
        """Refuse unknown algorithms and pathways, and lengths that are none."""
        if self.algorithm not in get_args(Algorithm):
            raise ValueError(f"SsdPath: algorithm must be one of {get_args(Algorithm)}, got {self.algorithm!r}")
        if self.chunk_len is not None and not 1 <= self.chunk_len <= _LONGEST:
            raise ValueError(f"SsdPath: chunk_len must be None or from 1 to {_LONGEST}, got {self.chunk_len}")
        if self.pathway not in get_args(Pathway):
            raise ValueError(f"SsdPath: pathway must be one of {get_args(Pathway)}, got {self.pathway!r}")

    @staticmethod
    def or_default(path: SsdPath | None) -> SsdPath:
        """`path`, or the default where there is none.

        Raises:
            TypeError: it is something else.
        """
        if path is not None and not isinstance(path, SsdPath):
            raise TypeError(f"path must be an SsdPath, as SsdPath.minimal(), got {path!r}")
        return path or SsdPath()

    @classmethod
    def recurrent(cls) -> SsdPath:
        """One step after the other."""
        return cls("recurrent")

    @classmethod
    def minimal(cls, chunk_len: int | None = None) -> SsdPath:
        """Segment-sum masks and batched matmuls, backward by autograd."""
        return cls("minimal", chunk_len)

    @classmethod
    def serial(cls, chunk_len: int | None = None) -> SsdPath:
        """Five batched stages, backward by autograd."""
        return cls("serial", chunk_len)

    @classmethod
    def serial_recalculated(cls, chunk_len: int | None = None) -> SsdPath:
        """One chunk at a time, with the hand-derived backward that keeps the inputs only."""
        return cls("serial_recalculated", chunk_len)

    @classmethod
    def fused(cls, chunk_len: int | None = None) -> SsdPath:
        """The compiled kernels; the scan raises `RuntimeError` where there are none."""
        return cls("fused", chunk_len)

    @classmethod
    def for_block(cls, block: ScanDims) -> SsdPath:
        """The default algorithm with the chunk length that suits `block` written out."""
        return cls(chunk_len=cls.optimal_chunk_len(block.d_state, block.headdim, block.rank))

    @staticmethod
    def optimal_chunk_len(d_state: int, headdim: int, rank: int = 1) -> int:
        """About √(d_state·headdim), rounded up to a multiple of 32, at most 512.

        With MIMO the l·r rows of a chunk are fused into one matrix, so that length is divided by the rank.
        """
        fused_len = min(512, 32 * math.ceil(math.isqrt(d_state * headdim) / 32))
        return max(1, fused_len // rank)

    def chunk_len_or_optimal(self, d_state: int, headdim: int, rank: int = 1) -> int:
        """This path's chunk length, or where it has none, the one that suits its algorithm.

        That is `optimal_chunk_len` for the portable algorithms; the kernels keep the rows of a chunk in a core's
        first- and second-level caches.
        """
        if self.chunk_len is not None:
            return self.chunk_len
        if self.algorithm == "fused":
            return max(1, FUSED_CHUNK_ROWS // rank)
        return self.optimal_chunk_len(d_state, headdim, rank)
