"""Prompts into states, in segments of fixed length, so that memory does not grow with the prompt.

Letters: b batch, t time, v vocabulary, d d_model.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anymamba.core.layout import Padding
from anymamba.generation.sampling import check_integer, row_key
from anymamba.generation.state import GenerationState
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM

SEGMENT_LEN = 2048


@torch.no_grad()
def start(
    model: MambaLM,
    input_ids: Int[Tensor, "b t"] | None,
    cache: LMCache | GenerationState | None = None,
    *,
    mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    segment_len: int = SEGMENT_LEN,
) -> GenerationState:
    """Run prompts through the model, ready to generate.

    Args:
        model: the language model.
        input_ids: prompts, (b, t); None to take a `GenerationState` as it is.
        cache: what the rows continue from: a cache of the model, or the state of an earlier generation.
        mask: True for real tokens (b, t), padding anywhere; or lengths (b,) of rows that are padded at the end.
        segment_len: tokens that are computed at once.

    Returns:
        The state of the rows after their prompts.

    Raises:
        TypeError: prompts or a cache of the wrong type.
        ValueError: a row without tokens, or ids out of range.
    """
    _check_cache(cache)
    check_integer("segment_len", segment_len)
    earlier = cache if isinstance(cache, GenerationState) else None
    if input_ids is None:
        if mask is not None:
            raise ValueError("a mask needs the prompts it belongs to (input_ids), got a mask alone")
        if earlier is None:
            raise ValueError("generation needs a prompt (input_ids), or the state of an earlier generation as cache")
        return earlier
    prompts = _prompts(model, input_ids, mask)
    if cache is not None and cache.batch_size != len(prompts):
        raise ValueError(f"the cache must have {len(prompts)} rows, one for each prompt, got {cache.batch_size}")
    if not prompts:
        raise ValueError("generation needs at least one row, got a batch of 0")
    logits, new = prefill(model, prompts, earlier.cache if earlier else cache, segment_len)  # type: ignore[arg-type]
    vocab = model.config.padded_vocab_size
    seen = torch.zeros(len(prompts), vocab, dtype=torch.bool) if earlier is None else earlier.seen.clone()
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt.cpu()] = True
    if earlier is not None:
        return GenerationState(new, logits, seen, earlier.keys, earlier.counts)
    keys = torch.tensor([row_key(prompt) for prompt in prompts], dtype=torch.int64)
    return GenerationState(new, logits, seen, keys, torch.zeros_like(keys))


@torch.no_grad()
def prefill(
    model: MambaLM, prompts: list[Tensor], cache: LMCache | None = None, segment_len: int = SEGMENT_LEN
) -> tuple[Float[Tensor, "b v"], LMCache]:
    """Run the model over prompts of any lengths; a row that has ended is not computed any further.

    Args:
        model: the language model.
        prompts: the token ids of each row, at least one.
        cache: what the rows continue from; a fresh start if not given.
        segment_len: tokens that are computed at once.

    Returns:
        The logits of the token that follows each row (b, v), and the cache after it.
    """
    if segment_len < 1:
        raise ValueError(f"segment_len must be at least 1, got {segment_len}")
    lengths = [len(prompt) for prompt in prompts]
    active, done, caches, logits = list(range(len(prompts))), [], [], []
    for begin in range(0, max(lengths), segment_len):
        end = begin + segment_len
        ids_bt, lengths_b = _batch([prompts[row][begin:end] for row in active])
        ending = [i for i, row in enumerate(active) if lengths[row] <= end]
        staying = [i for i, row in enumerate(active) if lengths[row] > end]
        output = model(ids_bt, cache, mask=lengths_b, logits="last" if ending else "none")
        cache = output.cache
        if not ending:
            continue
        logits.append(output.logits[ending, 0] if staying else output.logits[:, 0])
        caches.append(cache.rows(ending) if staying else cache)
        done += [active[i] for i in ending]
        active, cache = [active[i] for i in staying], cache.rows(staying) if staying else cache
    if len(caches) == 1:
        return logits[0], caches[0]
    back = torch.tensor(done, device=logits[0].device).argsort()
    return torch.cat(logits)[back], LMCache.cat(caches).rows(back)


def _check_cache(cache: object) -> None:
    if cache is None or isinstance(cache, LMCache | GenerationState):
        return
    hints = [f"; pass its .{name}" for name in ("state", "cache") if getattr(cache, name, None) is not None]
    raise TypeError(f"cache must be a GenerationState or an LMCache, got {type(cache).__name__}{''.join(hints[:1])}")


def _batch(parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows as one batch (b, t), with their lengths (b,) if they differ."""
    lengths = [len(part) for part in parts]
    if len(set(lengths)) == 1:
        return torch.stack(parts), None
    return pad_sequence(parts, batch_first=True), torch.tensor(lengths, device=parts[0].device)


def _prompts(model: MambaLM, input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The real tokens of each row, on the model's device, checked."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor (b, t), got {type(input_ids).__name__}; torch.tensor([ids]) makes one from a "
            "list of ids, and a tokenizer makes ids from a text"
        )
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids must be integers of shape (b, t), got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a tensor (b, t) or lengths (b,), got {type(mask).__name__}")
    b, t = input_ids.shape
    if mask is None:
        prompts = list(input_ids)
    elif mask.dtype == torch.bool and mask.shape == input_ids.shape:
        prompts = [row[real] for row, real in zip(input_ids, mask, strict=True)]
    else:
        lengths = Padding.from_mask("generate", mask, b, t, input_ids.device).lengths.tolist()
        prompts = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
    largest = model.config.padded_vocab_size - 1
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"a prompt must have at least one token, got none in row {i}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high > largest:
            raise ValueError(f"token ids must be between 0 and {largest}, got {low} to {high} in row {i}")
    return [prompt.to(model.device) for prompt in prompts]
