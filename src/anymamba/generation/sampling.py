"""From logits to tokens: penalties, filters, and randomness that belongs to a row and not to its batch.

A row draws its n-th token with a number in [0, 1) that is a hash of the seed, the row's key and n. So a row draws the
same tokens in any batch, and another process can continue it where it stopped.

Letters: b batch, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.core.config_fields import suggest

_FIRST_CANDIDATES = 256
_LIMIT = 1e30  # float32 logits stay finite, however often a token occurs
_RANGES = {
    "repetition_penalty": (1 / _LIMIT, _LIMIT),
    "presence_penalty": (-_LIMIT, _LIMIT),
    "frequency_penalty": (-_LIMIT, _LIMIT),
    "temperature": (0.0, _LIMIT),
}
_Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options for choosing the next token, applied in the order of the fields.

    Attributes:
        repetition_penalty: Factor for tokens that have occurred in the row: their logits are divided by it if positive,
            and multiplied if negative. Above 1 makes repetition less likely.
        presence_penalty: Number subtracted from the logits of tokens that were generated in the row.
        frequency_penalty: Number subtracted from these logits for each time that the token was generated.
        logit_bias: Numbers added to the logits of these tokens.
        temperature: Divisor of the logits before a token is drawn; 0 takes the most likely token. If None: 1 with a
            seed, top_k, top_p or min_p, which ask for draws, and 0 without.
        top_k: Number of most likely tokens to draw from; all if None.
        top_p: Probability that the most likely tokens to draw from reach together.
        min_p: Least probability of a token to draw, relative to the most likely one.
        seed: Seed of the draws. They depend on it and on the row alone, not on the batch or on `torch.manual_seed`. A
            new one each time if None.
    """

    repetition_penalty: int | float = 1.0
    presence_penalty: int | float = 0.0
    frequency_penalty: int | float = 0.0
    logit_bias: Mapping[int, int | float] | None = None
    temperature: int | float | None = None
    top_k: int | None = None
    top_p: int | float = 1.0
    min_p: int | float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value, and resolve the default temperature."""
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) and not (value is None and name == "temperature"):
                raise TypeError(f"{name} must be a number, got {value!r}")
        for name in ("top_k", "seed"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value)
        _check_bias(self.logit_bias)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
        checks = (
            ("top_k", "None or at least 1", self.top_k is None or self.top_k >= 1),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("min_p", "at least 0 and below 1", 0 <= self.min_p < 1),
        )
        for name, expected, is_valid in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")
        if self.temperature is None:
            is_drawn = self.seed is not None or self.top_k is not None or self.top_p != 1 or self.min_p != 0
            object.__setattr__(self, "temperature", 1.0 if is_drawn else 0.0)

    @property
    def needs_token_counts(self) -> bool:
        """Return whether a penalty depends on how often a token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @staticmethod
    def from_options(options: dict[str, Any]) -> Sampling:
        """Return the sampling that keyword arguments ask for; raise `TypeError` for an unknown one."""
        known = [field.name for field in dataclasses.fields(Sampling)]
        for name in options:
            if name not in known:
                suggestion = suggest(name, known) or f"; the options are {', '.join(known)}"
                raise TypeError(f"generation has no option {name!r}{suggestion}")
        return Sampling(**options)


def check_integer(name: str, value: Any) -> None:
    """Raise TypeError for anything but an integer."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _check_bias(bias: Any) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {bias!r}")
    for token, value in bias.items():
        check_integer("a token of logit_bias", token)
        if not isinstance(value, numbers.Real):
            raise TypeError(f"logit_bias must map token ids to numbers, got {value!r} for token {token}")
        if not -_LIMIT <= value <= _LIMIT:  # type: ignore[operator]
            raise ValueError(f"logit_bias must be between {-_LIMIT:g} and {_LIMIT:g}, got {value!r} for token {token}")


class TokenScore(NamedTuple):
    """A token and its log-probability under the model, before temperature and filters."""

    token: int
    logprob: float


def score_token(logits_v: Float[Tensor, " v"], token: int, alternatives: int) -> list[TokenScore]:
    """Return the log-probability of a token, followed by those of the most likely ones, likeliest first."""
    logprobs_v = logits_v.to("cpu", torch.float32).log_softmax(-1)
    ids = [token, *logprobs_v.topk(min(alternatives, len(logprobs_v))).indices.tolist()]
    return [TokenScore(i, logprobs_v[i].item()) for i in ids]


def sample_tokens(
    logits: Float[Tensor, "b v"],
    sampling: Sampling,
    uniforms: Sequence[float],
    seen: Bool[Tensor, "b v"] | None = None,
    token_counts: Sequence[Mapping[int, int]] | None = None,
    allowed: Sequence[Bool[Tensor, " v"] | None] | None = None,
) -> Int[Tensor, " b"]:
    """Choose the next token of each row.

    Args:
        logits: Logits (b, v), in any dtype, on any device.
        sampling: Penalties, filters and temperature.
        uniforms: A number in [0, 1) for each row; not used at temperature 0.
        seen: True for tokens that the repetition penalty applies to (b, v).
        token_counts: For each row, how often each token was generated, for the other penalties.
        allowed: For each row, True for the tokens to choose from, at least one (v,); None for all.

    Returns:
        Token ids (b,), on the CPU.
    """
    # 1) Penalties and biases, in float32 on the CPU for a model of any dtype and device.
    logits = logits.to("cpu", torch.float32)
    if sampling.repetition_penalty != 1 and seen is not None:
        penalized = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen, penalized, logits)
    logits = _add_biases(logits, sampling, token_counts)
    # 2) Tokens that a grammar does not allow have probability 0.
    if allowed is not None and any(mask is not None for mask in allowed):
        everything = torch.ones(logits.shape[1], dtype=torch.bool)
        mask_bv = torch.stack([everything if mask is None else mask for mask in allowed])
        logits = logits.masked_fill(~mask_bv, -torch.inf)
    # 3) Greedy rows are done.
    largest, greedy = logits.max(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"the model's logits are not finite: the largest of each row are {largest.tolist()}")
    if not sampling.temperature:
        return greedy
    # 4) Probabilities at the temperature. A smaller divisor is 0 in float32, and the largest logit would be 0 / 0.
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    p_bv = ((logits - largest.unsqueeze(-1)) / temperature).softmax(-1)
    # 5) One draw per row, from the candidates that the filters leave.
    return torch.tensor([_draw(p_v, sampling, u) for p_v, u in zip(p_bv.numpy(), uniforms, strict=True)])


def _add_biases(
    logits: Float[Tensor, "b v"], sampling: Sampling, token_counts: Sequence[Mapping[int, int]] | None
) -> Float[Tensor, "b v"]:
    """Return the logits with the bias, and without the penalties for tokens that were generated."""
    bias = sampling.logit_bias or {}
    counts = token_counts if sampling.needs_token_counts and token_counts is not None else []
    if bias and not 0 <= min(bias) <= max(bias) < logits.shape[1]:
        raise ValueError(f"logit_bias must be for tokens 0 to {logits.shape[1] - 1}, got {min(bias)} to {max(bias)}")
    if not bias and not any(counts):
        return logits
    logits = logits.clone()
    for row, count_of in zip(logits, counts, strict=bool(counts)):
        if count_of:
            times = torch.tensor(list(count_of.values()), dtype=torch.float32)
            row[list(count_of)] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if bias:
        logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32)
    return logits


# One row is too little work for torch's threads, so it is drawn with numpy.


def _draw(p_v: _Numbers, sampling: Sampling, uniform: float) -> int:
    """Draw from one row: the first candidate whose cumulative probability exceeds `uniform`."""
    p, token_at = _candidates(p_v, sampling)
    if sampling.min_p > 0:
        p = np.where(p >= sampling.min_p * p.max(), p, np.float32(0))
    cumulative = np.cumsum(p, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may bring the product up to the sum; then the last token with a probability is taken.
    index = int(p.nonzero()[0][-1]) if index == p.shape[0] else index
    return token_at(index)


def _candidates(p_v: _Numbers, sampling: Sampling) -> tuple[_Numbers, Callable[[int], int]]:
    """Return the candidates that top-k and top-p leave: their probabilities, and the token at each index.

    The most likely comes first; if all are left, they stay in the vocabulary's order.
    """
    size = p_v.shape[0]
    if sampling.top_k is None and sampling.top_p == 1:
        return p_v, lambda index: index
    # Sorting a whole vocabulary may take longer than the model's step: a few tokens usually suffice.
    top, ids = torch.from_numpy(p_v).topk(min(sampling.top_k or _FIRST_CANDIDATES, size))
    p = top.numpy()
    mass = sampling.top_p if sampling.top_k is None else sampling.top_p * float(p.sum(dtype=np.float64))
    size_of_nucleus = _count_nucleus(p, mass)
    if size_of_nucleus or sampling.top_k is not None or p.shape[0] == size:
        return p[: size_of_nucleus or size], lambda index: int(ids[index])
    # Sorting numbers alone is many times faster than sorting them with their indices.
    sorted_p = np.sort(p_v)[::-1]
    sorted_p = sorted_p[: _count_nucleus(sorted_p, mass) or size]

    def token_at(index: int) -> int:
        before = int((sorted_p[:index] == sorted_p[index]).sum())
        return int((p_v == sorted_p[index]).nonzero()[0][before])

    return sorted_p, token_at


def _count_nucleus(p: _Numbers, mass: float) -> int:
    """Return how many of the descending probabilities reach `mass` together; 0 if all of them do not."""
    index = int(np.searchsorted(np.cumsum(p, dtype=np.float64), mass))
    return index + 1 if index < p.shape[0] else 0


def hash_tokens(tokens: Int[Tensor, " t"]) -> int:
    """Return the sampling key of a row that starts with these tokens."""
    return _hash(tokens.to("cpu", torch.int64).numpy().tobytes())


def split_keys(keys: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Give rows with the same key and count separate keys, in order; the first keeps its key."""
    occurrences: dict[tuple[int, int], int] = {}
    result = []
    for pair in zip(keys, counts, strict=True):
        n = occurrences[pair] = occurrences.get(pair, -1) + 1
        result.append(pair[0] if n == 0 else _hash(struct.pack("<qq", pair[0], n)))
    return result


def draw_uniform(seed: int, key: int, count: int) -> float:
    """Return the number in [0, 1) with which a row draws its `count`-th token."""
    return (_hash(struct.pack("<QqQ", seed % 2**64, key, count)) & (2**53 - 1)) / 2**53


def _hash(content: bytes) -> int:
    """Return a hash as a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
