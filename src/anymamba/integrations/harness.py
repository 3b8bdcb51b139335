"""The model type `anymamba` of lm-evaluation-harness, which scores and generates for its tasks.

    python -m anymamba.integrations.harness --model anymamba --model_args pretrained=DIR --tasks lambada_openai

The harness finds model types in its own table only, so this module has to be imported first. As a script it does so and
then is the command `lm_eval`, with all its options; in Python, import it and call `lm_eval.simple_evaluate`.

Requests are turned into tokens, windows and scores as the harness' type `hf` does, so that both give the same scores
for the same weights. A context is read once for all its continuations, because a state can be continued many times.

Letters: b rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("to evaluate with the harness, install it: pip install 'anymamba[eval]'") from error

from anymamba.checkpoints.open import resolve_source
from anymamba.core.dtypes import parse_device
from anymamba.core.io import read_json
from anymamba.generation.chat import ChatTemplate
from anymamba.generation.pipeline import pipeline
from anymamba.generation.prefill import prefill
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import FileTokenizer, Tokenizer

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_MAX_LOGITS = 2**24  # held at once while continuations are scored
_AUTO_BATCH_SIZE = 16
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class _Request(NamedTuple):
    """A continuation to score.

    Attributes:
        number: Position among the requests.
        context: Tokens before it, at least one.
        continuation: Tokens to score, at least one.
    """

    number: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@register_model("anymamba")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A language model with its tokenizer, as the harness calls it.

    Args:
        pretrained: Directory, GGUF file or hub id of the model.
        tokenizer: "bytes", a tokenizer.json, a directory with one, or a hub id. Default: the model's.
        dtype: Dtype to compute in, such as "float32". Default ("auto"): the file's.
        weights: Format of the weights: "bfloat16", "float16", "int8" or "int4". Default: the dtype.
        device: Device to compute on. Default: the first of cuda, mps and cpu that is available.
        batch_size: Number of rows computed together; "auto" is 16. It changes scores by rounding only.
        max_batch_size: Largest batch size.
        max_length: Number of tokens that a prediction sees at most. A model has no such limit, but the scores of long
            texts depend on it; the default is that of the harness.
        max_gen_toks: Number of tokens to generate where a task does not say.
        add_bos_token: Whether the tokenizer's special tokens precede a text. Default: yes.
        prefix_token_id: Token before a text without context. Default: the token that begins a text, or else the one
            that ends it.
        a_activation: Activation of Mamba-3's decay rates, where the config does not name it.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        prefix_token_id: int | None = None,
        a_activation: str | None = None,
    ) -> None:
        """Load the model and its tokenizer."""
        super().__init__()
        if dtype not in (None, "auto", *_DTYPES):
            raise ValueError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {dtype!r}")
        size = _AUTO_BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        self.batch_size = min(size, max_batch_size or size)
        self.max_length = int(max_length)
        self.max_gen_toks = int(max_gen_toks)
        for name in ("batch_size", "max_length", "max_gen_toks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._source = resolve_source(pretrained)
        self._pipeline = pipeline(
            self._source,
            tokenizer=tokenizer,
            dtype=_DTYPES.get(dtype or "auto"),
            weights=weights,
            device=parse_device(device or "auto", "device"),
            ssm_cfg=None if a_activation is None else {"a_activation": a_activation},
        )
        self.model = self._pipeline.model
        self.tokenizer = self._pipeline.tokenizer
        self._device = self.model.device
        self._adds_special_tokens = bool(add_bos_token)
        self._prefix = _find_first_token(self.tokenizer) if prefix_token_id is None else int(prefix_token_id)

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.tokenizer.end[0] if self.tokenizer.end else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context."""
        if self._prefix is None:
            raise ValueError(
                "a text without context needs a token before it, and the tokenizer has none that begins or ends a "
                "text: pass one as prefix_token_id in --model_args, such as 10 (a newline) for a model of bytes"
            )
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness' own cache of requests."""
        path = self.tokenizer.path if isinstance(self.tokenizer, FileTokenizer) else "bytes"
        return str(path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; special tokens that it begins with are not put before it again."""
        if add_special_tokens is None:
            add_special_tokens = self._adds_special_tokens and not self._begins_with_prefix(string)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def _begins_with_prefix(self, text: str) -> bool:
        """Return whether the text is written with its first special token, as chat templates write it."""
        if not isinstance(self.tokenizer, FileTokenizer) or self._prefix is None:
            return False
        return self.tokenizer.encode(text[:64])[:1] == [self._prefix]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, by the model's own template."""
        return self._chat_template().render(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's template, which the harness records; None if it is not to be applied."""
        return self._chat_template().sources["default"] if chat_template else None

    def _chat_template(self) -> ChatTemplate:
        tokenizer = self.tokenizer
        return ChatTemplate.from_directory(tokenizer.path if isinstance(tokenizer, FileTokenizer) else self._source)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of `max_length` tokens without overlap."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            text_windows = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the most likely one."""
        # 1) Contexts that are too long lose their beginning, and equal ones are read once.
        by_context: dict[tuple[int, ...], list[_Request]] = {}
        for number, (_, context_ids, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(f"expected continuations of 1 to {self.max_length} tokens, got {len(continuation)}")
            context = tuple((*context_ids, *continuation)[-(self.max_length + 1) :][: -len(continuation)])
            by_context.setdefault(context, []).append(_Request(number, context, tuple(continuation)))
        # 2) Rows of about the same length are computed together.
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        contexts = sorted(by_context, key=len, reverse=True)
        for batch in _split(contexts, self.batch_size):
            lengths = torch.tensor([len(context) for context in batch])
            ids = pad_sequence([torch.tensor(context) for context in batch], batch_first=True)
            state = prefill(self.model, ids.to(self._device), mask=lengths.to(self._device))
            pairs = [(row, request) for row, context in enumerate(batch) for request in by_context[context]]
            for group in _split(sorted(pairs, key=lambda pair: len(pair[1].continuation)), self.batch_size):
                rows, group_requests = zip(*group, strict=True)
                scores = self._score(state.rows(list(rows)), [request.continuation for request in group_requests])
                for request, score in zip(group_requests, scores, strict=True):
                    results[request.number] = score
        # 3) The harness may keep results.
        for (texts, *_ids), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _score(self, state: GenerationState, continuations: Sequence[tuple[int, ...]]) -> list[tuple[float, bool]]:
        """Score a continuation of each row, a few tokens at a time."""
        length = max(map(len, continuations))
        targets = [torch.tensor(ids) for ids in continuations]
        targets_bt = pad_sequence(targets, batch_first=True, padding_value=-1).to(self._device)
        logits_bv, cache = state.logits, state.cache
        total = torch.zeros(len(targets), dtype=torch.float64, device=self._device)
        is_greedy = torch.ones(len(targets), dtype=torch.bool, device=self._device)
        # The logits before the first token are those of the state.
        self._add(logits_bv.unsqueeze(1), targets_bt[:, :1], total, is_greedy)
        step = max(1, _MAX_LOGITS // logits_bv.numel())
        for begin in range(0, length - 1, step):
            end = min(begin + step, length - 1)
            output = self.model(targets_bt[:, begin:end].clamp(min=0), cache)
            self._add(output.logits, targets_bt[:, begin + 1 : end + 1], total, is_greedy)
            cache = output.cache
        return list(zip(total.tolist(), is_greedy.tolist(), strict=True))

    def _add(self, logits_btv: Tensor, targets_bt: Tensor, total: Tensor, is_greedy: Tensor) -> None:
        """Add the log-likelihoods of targets; -1 is padding."""
        logits_btv = logits_btv.float() if logits_btv.dtype != torch.float64 else logits_btv
        is_real = targets_bt >= 0
        targets = targets_bt.clamp(min=0).unsqueeze(-1)
        scores = logits_btv.gather(-1, targets).squeeze(-1) - logits_btv.logsumexp(-1)
        total += (scores * is_real).sum(1)
        is_greedy &= ((logits_btv.argmax(-1) == targets_bt) | ~is_real).all(1)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until one of their stop texts, or the token that ends a text."""
        results = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        for indices in by_options.values():
            max_new_tokens, stop, sampling = self._read_options(requests[indices[0]].args[1])
            prompts = [requests[index].args[0] for index in indices]
            completions = self._pipeline(
                prompts,
                max_new_tokens,
                stop=stop,
                add_special_tokens=self._adds_special_tokens,
                batch_size=self.batch_size,
                **sampling,
            )
            for index, completion in zip(indices, completions, strict=True):
                results[index] = completion.text
                self.cache_hook.add_partial("generate_until", requests[index].args, completion.text)
        return results

    def _read_options(self, options: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
        """Return the number of tokens, stop texts and sampling options of a task's options for generation."""
        options = normalize_gen_kwargs(options, self.max_gen_toks)
        max_new_tokens = options.pop("max_gen_toks")
        stop = [text for text in options.pop("until", None) or [] if text]
        if not options.pop("do_sample", False):
            options.pop("temperature", None)
        if unknown := sorted(set(options) - set(_SAMPLING)):
            raise ValueError(f"generation options must be among {', '.join(_SAMPLING)}, got {', '.join(unknown)}")
        return max_new_tokens, stop, options


def _find_first_token(tokenizer: Tokenizer) -> int | None:
    """Return the token that begins a text, or else the one that ends it; None if the tokenizer has neither."""
    if isinstance(tokenizer, FileTokenizer):
        file = tokenizer.path.parent / "tokenizer_config.json"
        token = read_json(file).get("bos_token") if file.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (token_id := tokenizer.id_of(token)) is not None:
            return token_id
    return next(iter((*tokenizer.encode("", add_special_tokens=True), *tokenizer.end)), None)


def _split(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
