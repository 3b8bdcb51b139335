"""The language model: embedding, a stack of residual layers, a norm and a head, with the official names.

    r = embedding[ids]        r <- layer_i(r)        logits = lm_head(norm_f(r))

Letters: b batch, t time, d d_model, v padded vocabulary, s packed sequences.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.padding import Padding
from anymamba.kernels.cpu.program import OUTPUT, Decoder, Program
from anymamba.models.cache import LMCache
from anymamba.models.checks import expect_cache, expect_ids, expect_labels, expect_targets
from anymamba.models.config import MambaLMConfig
from anymamba.models.layers import ResidualLayer, RMSNorm, make_norm
from anymamba.models.loss import IGNORED_LABEL, head_nats, logits_nats
from anymamba.models.tying import after_loading, before_loading
from anymamba.scan import SsdPath
from anymamba.scan.numerics import state_dtype

if TYPE_CHECKING:
    from anymamba.generation import Generation, GenerationState


class LMOutput(NamedTuple):
    """What the model says of a sequence.

    Attributes:
        logits: of the token that follows each input token, (b, t, v); (b, 1, v) for the last token only.
        loss: mean negative log-likelihood of the labels, if there were any.
        cache: to go on from.
    """

    logits: Float[Tensor, "b t v"]
    loss: Float[Tensor, ""] | None
    cache: LMCache


class Backbone(nn.Module):
    """Embedding, residual layers and the last norm."""

    def __init__(
        self, config: MambaLMConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the parameters."""
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.residual_in_fp32 = config.residual_in_fp32
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **factory)
        self.layers = nn.ModuleList(ResidualLayer(config, **factory) for _ in range(config.n_layer))
        self.norm_f = make_norm(config, **factory)

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        cache: LMCache | None = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " s1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], LMCache]:
        """The hidden states behind the last norm, and the new cache; arguments as for `MambaLM`."""
        caches = self._layer_caches(cache)
        residual = self._embed(input_ids)
        padding = None
        if mask is not None:
            padding = Padding.of("MambaLM", mask, input_ids.shape[0], input_ids.shape[1], input_ids.device)
            residual = padding.compact(residual)
        lengths = None if padding is None else padding.lengths
        new = []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            residual, layer_cache = layer(residual, layer_cache, path=path, cu_seqlens=cu_seqlens, mask=lengths)
            new.append(layer_cache)
        hidden = self.norm_f(residual)
        return (hidden if padding is None else padding.restore(hidden)), LMCache(tuple(new))

    def step(self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None) -> tuple[Float[Tensor, "b d"], LMCache]:
        """The hidden state behind the last norm for one token, and the new cache."""
        return self._step_layers(self._embed(input_ids), cache)

    def _step_layers(self, residual: Tensor, cache: LMCache | None) -> tuple[Tensor, LMCache]:
        """`step` behind the embedding, (b, d)."""
        new = []
        for layer, layer_cache in zip(self.layers, self._layer_caches(cache), strict=True):
            residual, layer_cache = layer(residual, layer_cache)
            new.append(layer_cache)
        return self.norm_f(residual), LMCache(tuple(new))

    def _embed(self, input_ids: Tensor) -> Tensor:
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"MambaLM: input_ids must be int32 or int64, got {input_ids.dtype}")
        try:
            hidden = self.embedding(input_ids)
        except IndexError as error:
            raise ValueError(
                f"MambaLM: token ids must be between 0 and {self.embedding.num_embeddings - 1}, "
                f"got {int(input_ids.min())} to {int(input_ids.max())}"
            ) from error
        wide = self.residual_in_fp32 and hidden.dtype != torch.float64
        return hidden.float() if wide else hidden

    def _layer_caches(self, cache: LMCache | None) -> tuple[Any, ...]:
        expect_cache(cache)
        if cache is None:
            return (None,) * len(self.layers)
        if len(cache.layers) != len(self.layers):
            raise ValueError(f"MambaLM: the cache must have {len(self.layers)} layers, got {len(cache.layers)}")
        return cache.layers


class MambaLM(nn.Module):
    """A Mamba language model. Parameter names, shapes and initialisation are the official ones.

    Args:
        config: a `MambaLMConfig`; its fields may be given as keywords instead.
        device: of the parameters.
        dtype: of the parameters (blocks keep some in float32, as officially).
    """

    def __init__(
        self,
        config: MambaLMConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialise the parameters."""
        super().__init__()
        if config is not None and fields:
            raise TypeError(f"MambaLM: give a config or its fields, not both; got also {sorted(fields)}")
        if config is not None and not isinstance(config, MambaLMConfig):
            raise TypeError(
                f"MambaLM: config must be a MambaLMConfig, got {type(config).__name__}; MambaLMConfig.from_dict(...) "
                "makes one of a table, MambaLM.from_pretrained(...) loads a directory"
            )
        self.config = config = config or MambaLMConfig(**fields)
        self._decoder = Decoder()
        self.backbone = Backbone(config, device=device, dtype=dtype)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, device=device, dtype=dtype)
        self._initialise()
        self.tie_weights()
        self.register_load_state_dict_pre_hook(before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(after_loading)  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        cache: LMCache | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " s1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        *,
        last_only: bool = False,
        path: SsdPath | None = None,
    ) -> LMOutput:
        """Run over a sequence of any length, from any cache to a new one.

        Args:
            input_ids: token ids, (b, t).
            cache: where the rows (or packed sequences) go on from; a fresh start if not given. It is not changed.
            labels: usually `input_ids` themselves, (b, t): the logits at each token are held against the label of the
                next. -100 is ignored, and so are padding and the first token of each sequence.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Logits at the padding are zero.
            last_only: logits for the last (real) token of each row or packed sequence only. A loss is then computed
                without the logits of all tokens at once, which are most of the memory of training.
            path: the scan's algorithm; the default if not given.

        Returns:
            logits, loss (None without labels) and the new cache.

        Raises:
            TypeError: an argument of another type or dtype.
            ValueError: ids or labels out of range, or shapes that do not go together.
        """
        expect_ids(input_ids)
        if labels is not None:
            expect_labels(labels, input_ids)
        hidden_btd, new = self.backbone(input_ids, cache, path=path, cu_seqlens=cu_seqlens, mask=mask)
        logits_btv = self.lm_head(_last(hidden_btd, cu_seqlens, mask) if last_only else hidden_btd)
        if labels is None:
            return LMOutput(logits_btv, None, new)
        targets_m = _next_labels(labels, cu_seqlens, mask).flatten()
        expect_targets(targets_m, logits_btv.shape[-1])
        if last_only:
            nats = head_nats(self.lm_head, hidden_btd.flatten(0, 1), targets_m)
        else:
            nats = logits_nats(logits_btv.flatten(0, 1), targets_m)
        return LMOutput(logits_btv, nats / (targets_m != IGNORED_LABEL).sum().clamp(min=1), new)

    def step(
        self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None, *, in_place: bool = False
    ) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token a row.

        Args:
            input_ids: token ids, (b,).
            cache: where the rows go on from; a fresh start if not given.
            in_place: the new cache may take the old one's memory: for a cache that nobody else holds.

        Returns:
            The logits of the next token (b, v), and the new cache.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1:
            found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"MambaLM.step: input_ids must be a tensor (b,), one token a row, got {found}")
        expect_cache(cache)
        residual_bd = self.backbone._embed(input_ids)
        if (done := self._step_compiled(residual_bd, cache, in_place)) is not None:
            return done
        hidden_bd, new = self.backbone._step_layers(residual_bd, cache)
        return self.lm_head(hidden_bd), new

    def _step_compiled(self, residual: Tensor, cache: LMCache | None, in_place: bool) -> tuple[Tensor, LMCache] | None:
        """`step` behind the embedding in one call to the compiled kernels; None where they do not cover it."""
        if torch.is_autocast_enabled("cpu") or residual.dtype != state_dtype(self.dtype):
            return None
        cache = self.init_cache(residual.shape[0]) if cache is None else cache
        tensors = [x for layer in cache.layers for x in layer.tensors()]
        done = self._decoder.run(self.dtype, self._record, residual, tensors, in_place)
        return done and (done[0], cache.with_tensors(done[1]))

    def _record(self, program: Program) -> None:
        program.watch.module(self, MambaLM)
        backbone = program.watch.child(self, "backbone", Backbone)
        layers = program.watch.child(backbone, "layers", nn.ModuleList)
        for name in layers._modules:
            program.watch.child(layers, name, ResidualLayer).record(program, 0)
        hidden = program.norm(0, program.watch.child(backbone, "norm_f", RMSNorm), program.input_width)
        program.linear(hidden, self, "lm_head", program.input_width, self.lm_head.out_features, to=OUTPUT)

    def init_cache(self, batch_size: int) -> LMCache:
        """The cache of a fresh start."""
        return LMCache(tuple(layer.mixer.init_cache(batch_size) for layer in self.backbone.layers))  # type: ignore[union-attr, operator]

    def tie_weights(self) -> None:
        """Make the head the embedding, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are one parameter now."""
        head: Tensor | None = getattr(self.lm_head, "weight", None)
        return head is not None and head is getattr(self.backbone.embedding, "weight", None)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.backbone.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding."""
        return self.backbone.embedding.weight.dtype

    def fingerprint(self) -> str:
        """A name for these weights in this dtype, so that a state is not fed to another model.

        It covers the architecture and every parameter's name, shape, dtype and up to 256 of its values, evenly spaced.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.config.layer, str(self.config.block_config())]).encode())
        for name, parameter in self.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            flat, count = parameter.detach().reshape(-1), min(256, parameter.numel())
            index = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
            digest.update(flat[index].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        mapped: bool = False,
    ) -> MambaLM:
        """Load a checkpoint: a directory, or the id of a repository on the hub.

        Args:
            source: a directory in any of `anymamba.models.formats`, or "owner/name".
            dtype: of the parameters; that of the file if not given.
            device: of the parameters.
            mapped: leave weights of the same dtype in the file, which must then stay as it is: if it is overwritten in
                place the model changes, and if it is cut short the process ends. Saves memory and the time to copy.
        """
        # The file formats are built on this module, so they cannot be imported above it.
        from anymamba.models.pretrained import load_model

        return load_model(source, dtype=dtype, device=device, mapped=mapped)

    def save_pretrained(self, directory: str | os.PathLike[str], *, format: str = "official") -> None:
        """Write config and weights in one of `anymamba.models.formats`.

        Raises:
            ValueError: the format cannot hold the model, or its weights do not fit its config; nothing is written.
        """
        from anymamba.models.pretrained import save_model

        save_model(self, directory, format)

    def push_to_hub(
        self,
        name: str,
        *,
        companions: str | os.PathLike[str] | None = None,
        format: str = "official",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Write config, weights and a card to a repository of the Hugging Face hub, in one commit.

        Args:
            name: "owner/name"; a repository that does not exist is made.
            companions: directory of the tokenizer's files, which go with the model, and of a README.md, if it has one.
            format: as for `save_pretrained`.
            private: whether a new repository is.
            token: to write with; the one of `hf auth login` if not given.

        Returns:
            The address of the commit.

        Raises:
            ValueError: the format cannot hold this model, `huggingface_hub` is missing, or the hub refuses.
        """
        from anymamba.models.sharing import push_model

        return push_model(self, name, companions=companions, format=format, private=private, token=token)

    def generate(
        self,
        input_ids: Int[Tensor, "b t"] | None = None,
        max_new_tokens: int = 128,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: int | Sequence[int | Sequence[int]] | Tensor | None = None,
        seed: int | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        cache: LMCache | GenerationState | None = None,
        segment_len: int = 2048,
        return_state: bool = False,
    ) -> Generation:
        """Continue token sequences.

        Args:
            input_ids: prompts, (b, t); may be left out to go on from a `GenerationState`.
            max_new_tokens: the most tokens to give each row.
            temperature: 0 for the most likely token, always; else the logits are divided by it and a token is drawn. If
                not given: 1 with a seed, top_k, top_p or min_p, which ask for draws, and 0 without.
            top_k: draw from the k most likely tokens only.
            top_p: draw from the most likely tokens that together reach this probability.
            min_p: draw from tokens at least this many times as likely as the most likely.
            repetition_penalty: above 1, makes tokens less likely that a row has had before.
            stop: token ids, or sequences of them, behind which a row stops.
            seed: makes draws repeatable: a row's tokens depend on it and on the row alone, not on its batch, nor on
                `torch.manual_seed`. A new one each time if not given.
            mask: for prompts of different lengths, True for real tokens (b, t), padding anywhere; or lengths (b,) of
                rows that are padded at the end.
            cache: where the rows go on from: a cache of this model, or the state of an earlier generation.
            segment_len: tokens of a prompt that are computed at once.
            return_state: also return where the rows stand, which takes one more step of the model.

        Returns:
            `tokens` (b, n), 0 behind the end of rows that stopped early; `lengths` (b,), how many of them count, the
            stop token included; `state`, a `GenerationState` to go on from if it was asked for, else None; and
            `rows()`, the tokens that count as lists.

        Raises:
            TypeError: an argument of another type.
            ValueError: an empty prompt, ids out of range, or sampling values outside their ranges.
        """
        # Generation is a room above the models; this method is a door to it, opened when it is called.
        from anymamba.generation import generate

        return generate(
            self,
            input_ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
            mask=mask,
            cache=cache,
            segment_len=segment_len,
            return_state=return_state,
        )

    def _initialise(self) -> None:
        """Embedding N(0, 0.02); projections into the residual stream divided by √layers; their biases zero."""
        nn.init.normal_(self.backbone.embedding.weight, std=0.02)
        for name, parameter in self.backbone.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                bound = 1 / math.sqrt(parameter.shape[1] * self.config.n_layer)
                nn.init.uniform_(parameter, -bound, bound)
            elif name.endswith(("in_proj.bias", "out_proj.bias")):
                nn.init.zeros_(parameter)


def _last(hidden_btd: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
    """The hidden state of the last real token of each row, (b, 1, d), or packed sequence, (s, 1, d)."""
    if cu_seqlens is not None:
        return hidden_btd[0, cu_seqlens[1:].long() - 1].unsqueeze(1)
    if mask is None:
        return hidden_btd[:, -1:]
    if mask.dtype == torch.bool:
        last_b = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    else:
        last_b = (mask.long() - 1).clamp(min=0)
    return hidden_btd.gather(1, last_b[:, None, None].expand(-1, 1, hidden_btd.shape[2]))


def _next_labels(labels_bt: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
    """The label that each position's logits are held against: that of the next real token of its sequence, (b, t)."""
    padding = None
    if mask is not None:
        padding = Padding.of("MambaLM", mask, labels_bt.shape[0], labels_bt.shape[1], labels_bt.device)
        if padding.order is not None:
            labels_bt = labels_bt.gather(1, padding.order)
        labels_bt = labels_bt.masked_fill(~padding.front, IGNORED_LABEL)
    targets_bt = F.pad(labels_bt[:, 1:], (0, 1), value=IGNORED_LABEL)
    if cu_seqlens is not None:
        targets_bt[0, cu_seqlens[1:].long() - 1] = IGNORED_LABEL
    if padding is None or padding.order is None:
        return targets_bt
    return torch.empty_like(targets_bt).scatter_(1, padding.order, targets_bt)
