"""The language model: embedding, a stack of residual layers, a norm and a head, with the official names.

    r = embedding[ids]        r <- layer_i(r)        logits = lm_head(norm_f(r))

Letters: b batch, t time, d d_model, v padded vocabulary, s packed sequences.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.ground.padding import Padding
from anymamba.models import fingerprint
from anymamba.models.cache import LMCache
from anymamba.models.checks import expect_cache, expect_ids, expect_labels, expect_targets
from anymamba.models.config import MambaLMConfig, expect_fields
from anymamba.models.layers import ResidualLayer, RMSNorm, make_norm
from anymamba.models.loss import IGNORED_LABEL, head_nats, logits_nats
from anymamba.models.tying import after_loading, before_loading
from anymamba.scan import SsdPath

if TYPE_CHECKING:
    from anymamba.generation import Generation
    from anymamba.kernels.cpu.program import Program


class LMOutput(NamedTuple):
    """What the model says of a sequence.

    Attributes:
        logits: of the token that follows each input token, (b, t, v); (b, 1, v) or (z, 1, v) for the last tokens only;
            None if they were not asked for.
        loss: mean negative log-likelihood of the labels, if there were any.
        cache: to continue from.
        nats: the negative log-likelihood of all labels together, if there were any.
    """

    logits: Float[Tensor, "z t v"] | None
    loss: Float[Tensor, ""] | None
    cache: LMCache
    nats: Float[Tensor, ""] | None = None


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
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Padding | None = None,
    ) -> tuple[Float[Tensor, "b t d"], LMCache]:
        """The hidden states after the last norm, and the new cache; arguments as for `MambaLM`."""
        caches, residual = self._layer_caches(cache), self.embed(input_ids)
        cleaned = None
        if mask is not None:
            residual, cleaned = mask.compact(residual), mask.cleaned()
        new = []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            residual, layer_cache = layer(residual, layer_cache, path=path, cu_seqlens=cu_seqlens, mask=cleaned)
            new.append(layer_cache)
        hidden = self.norm_f(residual)
        return (hidden if mask is None else mask.restore(hidden)), LMCache(tuple(new))

    def embed(self, input_ids: Int[Tensor, "b *t"]) -> Float[Tensor, "b *t d"]:
        """The residual stream before the first layer.

        Raises:
            TypeError: ids that are no whole numbers.
            ValueError: ids that are no tokens, or on another device.
        """
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"MambaLM: input_ids must be int32 or int64, got {input_ids.dtype}")
        if input_ids.device != (device := self.embedding.weight.device):
            raise ValueError(f"MambaLM: input_ids must be on {device}, got {input_ids.device}")
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
        d_model: width of the residual stream (default: 2560).
        n_layer: how many layers (64).
        vocab_size: how many tokens (50277).
        ssm_cfg: "layer", the family of the blocks ("Mamba1", "Mamba2" or "Mamba3"), and fields of its config.
        d_intermediate: width of a gated MLP after each block (0: none).
        tie_embeddings: whether the head is the embedding (True).
        pad_vocab_size_multiple: the embedding has a multiple of so many rows (8).
        rms_norm: RMSNorm, or else LayerNorm (True).
        residual_in_fp32: keep the residual stream in float32 (True).
        fused_add_norm: of the official kernels; changes no result.
        attn_layer_idx: attention layers, which are refused.
        attn_cfg: of them.
        extra: fields of a config file that are none of ours, which are written back.
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
        expect_fields(fields)
        self.config = config = config or MambaLMConfig(**fields)
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
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        *,
        targets: Int[Tensor, "b t"] | None = None,
        logits: Literal["all", "last", "none"] = "all",
        path: SsdPath | None = None,
    ) -> LMOutput:
        """Run over a sequence of any length, from any cache to a new one.

        Args:
            input_ids: token ids.
            cache: what the rows (or packed sequences) continue from; a fresh start if not given. It is not changed.
            labels: usually `input_ids` themselves: the logits at each token are held against the label of the next.
                -100 is ignored, and so are padding and the first token of each sequence.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Logits at the padding are zero.
            targets: in place of labels, what each position's logits are held against, as it is.
            logits: of every token, of the last (real) token of each row or packed sequence, or none. A loss without all
                logits is computed a few tokens at a time: they are most of the memory of training.
            path: the scan's algorithm; the default if not given.

        Returns:
            logits, loss and nats (None without labels or targets), and the new cache.

        Raises:
            TypeError: an argument of another type or dtype.
            ValueError: ids or labels out of range, or shapes that do not go together.
        """
        expect_ids(input_ids)
        padding = None
        if mask is not None:
            padding = Padding.of("MambaLM", mask, input_ids.shape[0], input_ids.shape[1], input_ids.device)
        wanted = _targets(input_ids, labels, targets, cu_seqlens, padding)
        if logits not in ("all", "last", "none"):
            raise ValueError(f'MambaLM: logits must be "all", "last" or "none", got {logits!r}')
        hidden_btd, new = self.backbone(input_ids, cache, path=path, cu_seqlens=cu_seqlens, mask=padding)
        found = None
        if logits != "none":
            found = self.lm_head(hidden_btd if logits == "all" else _last(hidden_btd, cu_seqlens, padding))
        if wanted is None:
            return LMOutput(found, None, new)
        expect_targets(wanted, self.lm_head.out_features)
        if found is not None and logits == "all":
            nats = logits_nats(found.flatten(0, 1), wanted)
        else:
            nats = head_nats(self.lm_head, hidden_btd.flatten(0, 1), wanted)
        return LMOutput(found, nats / (wanted != IGNORED_LABEL).sum().clamp(min=1), new, nats)

    def step(self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token a row. `anymamba.decoder(model)` does the same in one call to the compiled kernels.

        Args:
            input_ids: token ids.
            cache: what the rows continue from; a fresh start if not given. It is not changed.

        Returns:
            The logits of the next token, and the new cache.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1:
            found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"MambaLM.step: input_ids must be a tensor (b,), one token a row, got {found}")
        hidden_b1d, new = self.backbone(input_ids.unsqueeze(1), cache)
        return self.lm_head(hidden_b1d.squeeze(1)), new

    def record(self, program: Program) -> None:
        """Describe `step` after the embedding to the compiled kernels.

        Raises:
            NotCovered: they cannot do what this model does.
        """
        program.expect_plain(self, MambaLM)
        backbone = program.child(self, "backbone", Backbone)
        layers = program.child(backbone, "layers", nn.ModuleList)
        for name in layers._modules:
            program.child(layers, name, ResidualLayer).record(program, 0)
        width = program.input_width
        hidden = program.norm(0, program.child(backbone, "norm_f", RMSNorm), width)
        program.linear(hidden, self, "lm_head", width, self.lm_head.out_features, to=-1)

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
        """A name for these weights in this dtype and what is computed with them.

        State files have it, so that a state is not fed to another model (`anymamba.models.fingerprint`).
        """
        return fingerprint.fingerprint(self, self.config)

    def has_fingerprint(self, name: str) -> bool:
        """Whether `name` is this model's fingerprint, as this or a former version computes it."""
        return fingerprint.has_fingerprint(self, self.config, name)

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

        Warns of weights that are not finite, unless they are mapped: nobody reads those before they are used.
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
        self, input_ids: Int[Tensor, "b t"] | None = None, max_new_tokens: int = 128, **options: Any
    ) -> Generation:
        """Continue token sequences: `anymamba.generate` with this model, which has the options."""
        # Generation is a room above the models; this method is a door to it, opened when it is called.
        from anymamba.generation import generate

        return generate(self, input_ids, max_new_tokens, **options)

    def _initialise(self) -> None:
        """Embedding N(0, 0.02); projections into the residual stream divided by √layers; their biases zero."""
        nn.init.normal_(self.backbone.embedding.weight, std=0.02)
        for name, parameter in self.backbone.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                bound = 1 / math.sqrt(parameter.shape[1] * self.config.n_layer)
                nn.init.uniform_(parameter, -bound, bound)
            elif name.endswith(("in_proj.bias", "out_proj.bias")):
                nn.init.zeros_(parameter)


def _last(hidden_btd: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """The hidden state of the last real token of each row, (b, 1, d), or packed sequence, (z, 1, d)."""
    if cu_seqlens is not None:
        return hidden_btd[0, cu_seqlens[1:].long() - 1].unsqueeze(1)
    if padding is None:
        return hidden_btd[:, -1:]
    last_b1 = (padding.lengths - 1).clamp(min=0).unsqueeze(1)
    if padding.order is not None:
        last_b1 = padding.order.gather(1, last_b1)
    return hidden_btd.gather(1, last_b1.unsqueeze(-1).expand(-1, 1, hidden_btd.shape[2]))


def _targets(
    input_ids: Tensor,
    labels: Tensor | None,
    targets: Tensor | None,
    cu_seqlens: Tensor | None,
    padding: Padding | None,
) -> Tensor | None:
    """What each position's logits are held against, (b·t,)."""
    if labels is not None and targets is not None:
        raise ValueError("MambaLM: labels and targets exclude each other, got both")
    for name, given in (("labels", labels), ("targets", targets)):
        if given is not None:
            expect_labels(name, given, input_ids)
    found = targets if labels is None else _next_labels(labels, cu_seqlens, padding)
    return None if found is None else found.flatten()


def _next_labels(labels_bt: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """The label of the next real token of each position's sequence, (b, t)."""
    if padding is not None:
        if padding.order is not None:
            labels_bt = labels_bt.gather(1, padding.order)
        labels_bt = labels_bt.masked_fill(~padding.front, IGNORED_LABEL)
    targets_bt = F.pad(labels_bt[:, 1:], (0, 1), value=IGNORED_LABEL)
    if cu_seqlens is not None:
        targets_bt[0, cu_seqlens[1:].long() - 1] = IGNORED_LABEL
    if padding is None or padding.order is None:
        return targets_bt
    return torch.empty_like(targets_bt).scatter_(1, padding.order, targets_bt)
