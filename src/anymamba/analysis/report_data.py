"""The data of a report about a model and a text, and the HTML page, which needs no network and no other files.

Series over time are stored in 16 bits and the cells of images in 8, so that a page of hundreds of heads stays within a
few megabytes; each is encoded as base64, with the range of its values.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.analysis.dual import matrix_of
from anymamba.analysis.layer_inputs import Layer, TokenScores, layers_and_scores
from anymamba.analysis.measures import state_measures
from anymamba.analysis.recurrence import Recurrence, recurrence
from anymamba.generation.tokenizers import IncrementalDetokenizer, Tokenizer
from anymamba.models.lm import MambaLM

_PAGE = Path(__file__).parent / "page"
_CHANNELS = 8  # shown of a block whose heads are single channels
_DOTS = 64  # half-lives shown of a layer
_IMAGE_BYTES = 1_500_000  # for all matrices together, and half of it for all rotations
_MAX_HALF_LIFE = 1e9  # tokens; a longer one is shown as infinite
_MIN_RATIO = 1e-9  # of a value to the largest one, on a logarithmic scale


@torch.no_grad()
def report_data(
    model: MambaLM, tokenizer: Tokenizer, ids: Sequence[int], *, name: str, text_tokens: int
) -> dict[str, Any]:
    """Return everything that the page draws, as a tree for JSON.

    There is at least one of `ids`; `text_tokens` is the number of tokens of the text before it was cut to them.
    """
    layers, scores = layers_and_scores(model, torch.tensor([list(ids)], device=model.device))
    terms = [recurrence(*layer) for layer in layers]
    heads = [_select_heads(layer_terms) for layer_terms in terms]
    count = max(1, sum(map(len, heads)))
    side = max(16, math.isqrt(2 * _IMAGE_BYTES // count))
    rows = max(4, _IMAGE_BYTES // 2 // (count * len(ids)))
    return {
        "name": name,
        "family": type(layers[0].block).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "whole": text_tokens,
        "tokens": token_texts(tokenizer, ids),
        "scores": _score_data(scores, tokenizer),
        "layers": [_layer_data(*part, side=side, rows=rows) for part in zip(layers, terms, heads, strict=True)],
    }


def render_page(data: dict[str, Any]) -> str:
    """Return the HTML page that draws the `data` of `report_data`.

    Everything that comes from the model or the text is shown as text: in the page it is JSON in which no tag can begin,
    and the content security policy of the page forbids every address.
    """
    names = ("page.html", "page.css", "draw.js", "page.js")
    parts = {name: (_PAGE / name).read_text(encoding="utf-8") for name in names}
    # Undecodable bytes have become lone surrogates, which UTF-8 cannot encode; ASCII JSON escapes them.
    content = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    title = html.escape(data["name"].encode("utf-8", "replace").decode("utf-8"))
    document = parts["page.html"]
    for marker, text in (
        ("<!-- style -->", f"<style>\n{parts['page.css']}</style>"),
        ("<!-- code -->", f"<script>\n{parts['draw.js']}{parts['page.js']}</script>"),
        ("<!-- title -->", f"<title>Inside {title}</title>"),
        ("<!-- data -->", f'<script type="application/json" id="data">{content}</script>'),
    ):
        before, after = document.split(marker)
        document = before + text + after
    return document


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; empty for a token that ends within a character."""
    stream = IncrementalDetokenizer(tokenizer)
    texts = [stream.push(token) for token in ids]
    texts[-1] += stream.finish()
    return texts


def _score_data(scores: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": _round(scores.logprob[0]),
        "rank": scores.rank[0].tolist(),
        "entropy": _round(scores.entropy[0]),
        "best": [
            [[_token_label(tokenizer, token), value] for token, value in zip(tokens, _round(values), strict=True)]
            for tokens, values in zip(scores.best_ids[0].tolist(), scores.best[0], strict=True)
        ],
    }


def _token_label(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or its id if it is part of a character."""
    text = tokenizer.decode([token])
    return f"#{token}" if not text or "\ufffd" in text else text


def _has_channels(terms: Recurrence) -> bool:
    """Return whether the heads of a block are single channels, as in Mamba-1."""
    return terms.v.shape[4] == 1


def _select_heads(terms: Recurrence) -> list[int]:
    """Return all heads; of single channels a few, from the one that forgets first to the one that forgets last."""
    if not _has_channels(terms):
        return list(range(terms.v.shape[3]))
    order = _horizons(terms).argsort()
    return [int(order[i]) for i in _spread_indices(len(order), _CHANNELS)]


def _spread_indices(n: int, count: int) -> list[int]:
    """Return up to `count` indices below n, evenly spaced and including both ends."""
    indices: list[int] = torch.linspace(0, n - 1, min(count, n)).round().long().tolist()
    return indices


def _layer_data(layer: Layer, terms: Recurrence, heads: list[int], *, side: int, rows: int) -> dict[str, Any]:
    measures = state_measures(*layer)
    has_channels = _has_channels(terms)
    horizons = _horizons(terms)
    half_lives = _slowest_half_lives(terms.log_decay[0], terms)
    read, skip = measures.read[0].square().mean(0), measures.skip[0].square().mean(0)
    state_fraction = (read / (read + skip).clamp(min=torch.finfo(read.dtype).tiny))[heads]
    count, width, states = terms.v.shape[3], terms.v.shape[4], terms.k.shape[4]
    unit = "block" if getattr(layer.block.config, "rotation", None) == "quaternion" else "pair"
    return {
        "unit": "channel" if has_channels else "head",
        "all": count,
        "directions": min(count if has_channels else width, states),
        "dots": _round(horizons.sort().values[_spread_indices(count, _DOTS)]),
        "heads": [
            {
                "number": head,
                "horizon": float(f"{horizons[head].item():.4g}"),
                "share": float(f"{state_fraction[i].item():.4g}"),
                "matrix": _matrix_data(terms, head, side),
                "half_life": _series(half_lives[:, head], is_log=True),
                "dt": _series(terms.dt[0, :, head], is_log=True),
                "norm": _series(measures.norm[0, :, head], is_log=True),
                "rank": _series(measures.rank[0, :, 0 if has_channels else head]),
                "read": _series(measures.read[0, :, head], is_log=True),
                "skip": _series(measures.skip[0, :, head], is_log=True),
                "rotation": _rotation_data(terms, head, rows, unit),
            }
            for i, head in enumerate(heads)
        ],
    }


def _horizons(terms: Recurrence) -> Tensor:
    """Return half-lives (h,) over the whole text."""
    return _slowest_half_lives(terms.log_decay[0].mean(0), terms)


def _slowest_half_lives(log_decay: Tensor, terms: Recurrence) -> Tensor:
    """Return half-lives (..., h), of the slowest state if each has its own decay (..., h, n)."""
    slowest = log_decay if terms.log_decay.ndim == 3 else log_decay.amax(-1)
    return (math.log(2) / -slowest).clamp(max=_MAX_HALF_LIFE)


def _matrix_data(terms: Recurrence, head: int, side: int) -> dict[str, Any]:
    """Return the lower triangle of the matrix of a head, as cube roots; each cell shows its largest weight."""
    matrix, ranks = matrix_of(terms, [head])[0, 0], terms.v.shape[2]
    if ranks > 1:
        matrix = matrix.unflatten(1, (-1, ranks)).unflatten(0, (-1, ranks)).square().sum((1, 3)).sqrt()
    cell = -(-len(matrix) // side)
    cells, largest = _largest_in_groups(_largest_in_groups(matrix, cell, 0), cell, 1), matrix.abs().max().item()
    levels = (cells.sign() * (cells.abs() / (largest or 1)) ** (1 / 3) * 127).round()
    lower = levels[tuple(torch.tril_indices(len(cells), len(cells)))]
    return {"side": len(cells), "cell": cell, "most": largest, "ranks": ranks, "data": _encode(lower, torch.int8)}


def _rotation_data(terms: Recurrence, head: int, rows: int, unit: str) -> dict[str, Any] | None:
    """Return the rotation angles of a head over time, in half circles; each row shows the largest of its group."""
    if terms.rotation is None or not terms.rotation.shape[3]:
        return None
    angles = terms.rotation[0, :, head].T / math.pi
    group = -(-len(angles) // rows)
    angles = _largest_in_groups(angles, group, 0)
    largest = angles.abs().max().item()
    encoded = _encode((angles / (largest or 1) * 127).round().flatten(), torch.int8)
    return {"unit": unit, "rows": len(angles), "group": group, "most": largest, "data": encoded}


def _largest_in_groups(x: Tensor, group: int, dim: int) -> Tensor:
    """Return the number with the largest absolute value in every `group` along `dim`."""
    if group == 1:
        return x
    shape = list(x.shape)
    shape[dim] = -shape[dim] % group
    grouped = torch.cat([x, x.new_zeros(shape)], dim).unflatten(dim, (-1, group))
    return grouped.gather(dim + 1, grouped.abs().argmax(dim + 1, keepdim=True)).squeeze(dim + 1)


def _series(x: Tensor, *, is_log: bool = False) -> dict[str, Any]:
    """Return a series over time in 16 bits, as logarithms if `is_log`."""
    x = x.double().nan_to_num(0.0)
    if is_log:
        x = x.clamp(min=max(_MIN_RATIO, x.max().item() * _MIN_RATIO)).log10()
    low, high = x.min().item(), x.max().item()
    levels = ((x - low) / ((high - low) or 1) * 65535).round() - 32768
    return {"low": low, "high": high, "log": is_log, "data": _encode(levels, torch.int16)}


def _encode(levels: Tensor, dtype: torch.dtype) -> str:
    content = levels.to("cpu", dtype).contiguous().numpy()
    return base64.b64encode(content.astype(content.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _round(x: Tensor) -> list[float]:
    """Return finite numbers, rounded to four digits."""
    return [float(f"{value:.4g}") for value in x.nan_to_num(0.0, _MAX_HALF_LIFE, -_MAX_HALF_LIFE).tolist()]
