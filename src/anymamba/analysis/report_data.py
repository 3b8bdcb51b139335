"""What a report shows of a model and a text, as numbers small enough for one page.

Numbers over time are stored in 16 bits and the cells of pictures in 8, so that a page of hundreds of heads stays within
a few megabytes; each is packed as base64 with the range that it spans.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.analysis.dual import matrix_of
from anymamba.analysis.layer_inputs import Layer, TokenScores, layers_and_scores
from anymamba.analysis.measures import state_measures
from anymamba.analysis.recurrence import Recurrence, recurrence
from anymamba.blocks.mamba1 import Mamba1
from anymamba.generation.tokenizers import IncrementalDecoder, Tokenizer
from anymamba.models.lm import MambaLM

_CHANNELS = 8  # of a Mamba-1 block that are shown
_DOTS = 64  # horizons of a layer that are shown
_PICTURE_BYTES = 1_500_000  # for all matrices together, and half of it for all turns
_LONGEST = 1e9  # tokens; a longer half-life is shown as endless
_LEAST = 1e-9


@torch.no_grad()
def report_data(model: MambaLM, tokenizer: Tokenizer, ids: Sequence[int], *, name: str, whole: int) -> dict[str, Any]:
    """Everything that the page draws, as a tree for JSON.

    Args:
        model: the language model.
        tokenizer: to show tokens as text.
        ids: the text, at least one token.
        name: of the model.
        whole: tokens of the text before it was cut to `ids`.
    """
    found, scores = layers_and_scores(model, torch.tensor([list(ids)], device=model.device))
    shown = [_shown_heads(layer) for layer in found]
    heads = max(1, sum(len(chosen) for chosen in shown))
    side = max(16, math.isqrt(2 * _PICTURE_BYTES // heads))
    rows = max(4, _PICTURE_BYTES // 2 // (heads * len(ids)))
    return {
        "name": name,
        "family": type(found[0].block).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "whole": whole,
        "tokens": token_texts(tokenizer, ids),
        "scores": _scores(scores, tokenizer),
        "layers": [_layer(layer, chosen, side=side, rows=rows) for layer, chosen in zip(found, shown, strict=True)],
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; empty for one that ends within a character, which the next completes."""
    stream = IncrementalDecoder(tokenizer)
    texts = [stream.push(token) for token in ids]
    texts[-1] += stream.finish()
    return texts


def _scores(scores: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": _rounded(scores.logprob[0]),
        "rank": scores.rank[0].tolist(),
        "entropy": _rounded(scores.entropy[0]),
        "best": [
            [[_named(tokenizer, token), value] for token, value in zip(tokens, _rounded(values), strict=True)]
            for tokens, values in zip(scores.best_ids[0].tolist(), scores.best[0], strict=True)
        ],
    }


def _named(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or its id if it is part of a character."""
    text = tokenizer.decode([token])
    return f"#{token}" if not text or "\ufffd" in text else text


def _shown_heads(layer: Layer) -> list[int]:
    """All heads; of a Mamba-1 block a few channels, from the one that forgets first to the one that forgets last."""
    if not isinstance(layer.block, Mamba1):
        return list(range(layer.block.config.nheads))
    order = _horizons(recurrence(*layer)).argsort()
    return [int(order[i]) for i in torch.linspace(0, len(order) - 1, min(_CHANNELS, len(order))).round().long()]


def _layer(layer: Layer, heads: list[int], *, side: int, rows: int) -> dict[str, Any]:
    terms, measures = recurrence(*layer), state_measures(*layer)
    horizons, lives, is_channels = _horizons(terms), _slowest(terms)[0], isinstance(layer.block, Mamba1)
    read, skip = measures.read[0].square().mean(0), measures.skip[0].square().mean(0)
    share = (read / (read + skip).clamp(min=torch.finfo(read.dtype).tiny))[heads]
    dots = horizons.sort().values[torch.linspace(0, len(horizons) - 1, min(_DOTS, len(horizons))).round().long()]
    return {
        "unit": "channel" if is_channels else "head",
        "all": len(horizons),
        "directions": min(layer.block.d_inner if is_channels else layer.block.headdim, layer.block.d_state),
        "dots": _rounded(dots),
        "heads": [
            {
                "number": head,
                "horizon": float(f"{horizons[head].item():.4g}"),
                "share": float(f"{share[i].item():.4g}"),
                "matrix": _matrix(terms, head, side),
                "half_life": _series(lives[:, head], is_log=True),
                "dt": _series(terms.dt[0, :, head], is_log=True),
                "norm": _series(measures.norm[0, :, head], is_log=True),
                "rank": _series(measures.rank[0, :, 0 if is_channels else head]),
                "read": _series(measures.read[0, :, head], is_log=True),
                "skip": _series(measures.skip[0, :, head], is_log=True),
                "turn": _turns(terms, head, rows, layer.block.config),
            }
            for i, head in enumerate(heads)
        ],
    }


def _slowest(terms: Recurrence) -> Tensor:
    """Half-lives (b, t, h), those of a channel's slowest state where each has its own."""
    log_decay = terms.log_decay if terms.log_decay.ndim == 3 else terms.log_decay.amax(-1)
    return (math.log(2) / -log_decay).clamp(max=_LONGEST)


def _horizons(terms: Recurrence) -> Tensor:
    """Half-lives (h,) over the whole text, of a channel's slowest state where each has its own."""
    mean = terms.log_decay[0].mean(0)
    return (math.log(2) / -(mean if mean.ndim == 1 else mean.amax(-1))).clamp(max=_LONGEST)


def _matrix(terms: Recurrence, head: int, side: int) -> dict[str, Any]:
    """The lower triangle of a head's matrix by cube roots of weights, in cells that hold the strongest of theirs."""
    matrix, ranks = matrix_of(terms, [head])[0, 0], terms.v.shape[2]
    if ranks > 1:
        matrix = matrix.unflatten(1, (-1, ranks)).unflatten(0, (-1, ranks)).square().sum((1, 3)).sqrt()
    cell = -(-len(matrix) // side)
    cells, most = _strongest(_strongest(matrix, cell, 0), cell, 1), matrix.abs().max().item()
    levels = (cells.sign() * (cells.abs() / (most or 1)) ** (1 / 3) * 127).round()
    lower = levels[tuple(torch.tril_indices(len(cells), len(cells)))]
    return {"side": len(cells), "cell": cell, "most": most, "ranks": ranks, "data": _packed(lower, torch.int8)}


def _turns(terms: Recurrence, head: int, rows: int, config: Any) -> dict[str, Any] | None:
    """Turns of a head's pairs, or of its blocks of four, over time in half circles, each row the strongest of some."""
    if terms.rotation is None or not terms.rotation.shape[3]:
        return None
    angles = terms.rotation[0, :, head].T / math.pi
    group = -(-len(angles) // rows)
    angles = _strongest(angles, group, 0)
    most = angles.abs().max().item()
    levels = (angles / (most or 1) * 127).round()
    unit = "block" if config.rotation == "quaternion" else "pair"
    packed = _packed(levels.flatten(), torch.int8)
    return {"unit": unit, "rows": len(angles), "group": group, "most": most, "data": packed}


def _strongest(x: Tensor, group: int, dim: int) -> Tensor:
    """The number with the largest absolute value in every `group` along `dim`."""
    if group == 1:
        return x
    missing = -x.shape[dim] % group
    shape = list(x.shape)
    shape[dim] = missing
    grouped = torch.cat([x, x.new_zeros(shape)], dim).unflatten(dim, (-1, group))
    return grouped.gather(dim + 1, grouped.abs().argmax(dim + 1, keepdim=True)).squeeze(dim + 1)


def _series(x: Tensor, *, is_log: bool = False) -> dict[str, Any]:
    """Numbers over time in 16 bits, by their logarithms if they are positive and span decades."""
    x = x.double().nan_to_num(0.0)
    if is_log:
        x = x.clamp(min=max(_LEAST, x.max().item() * _LEAST)).log10()
    low, high = x.min().item(), x.max().item()
    levels = ((x - low) / ((high - low) or 1) * 65535).round() - 32768
    return {"low": low, "high": high, "log": is_log, "data": _packed(levels, torch.int16)}


def _packed(levels: Tensor, dtype: torch.dtype) -> str:
    content = levels.to("cpu", dtype).contiguous().numpy()
    return base64.b64encode(content.astype(content.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _rounded(x: Tensor) -> list[float]:
    """Numbers rounded to four digits that JSON can hold."""
    return [float(f"{value:.4g}") for value in x.nan_to_num(0.0, _LONGEST, -_LONGEST).tolist()]
