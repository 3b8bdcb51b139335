"""The language model: embedding, a stack of residual layers, a norm and a head, with the official names.

    r = embedding[ids]        r <- layer_i(r)        logits = lm_head(norm_f(r))

Letters: b batch, t time, d d_model, v padded vocabulary, z packed sequences.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.base import prefill_with_states_at
from anymamba.core.checks import check_mutually_exclusive
from anymamba.core.context_parallel import SequencePart
from anymamba.core.layout import Padding
from anymamba.core.linear import apply_linear
from anymamba.core.weight_formats import QuantizedWeight
from anymamba.models import fingerprint
from anymamba.models.backbone import Backbone
from anymamba.models.cache import LMCache
from anymamba.models.config import MambaLMConfig, check_fields
from anymamba.models.inputs import check_ids, check_inputs, check_targets, flatten_packed_rows
from anymamba.models.loss import IGNORED_LABEL, chunked_cross_entropy, cross_entropy_sum
from anymamba.models.outputs import LMOutput, find_targets, in_rows, last_hidden
from anymamba.models.weight_tying import after_loading, before_loading
from anymamba.scan import SsdPath

if TYPE_CHECKING:
    from anymamba.generation import Generation
    from anymamba.kernels.cpu.step_program import Program


class MambaLM(nn.Module):
    """A Mamba language model. Parameter names, shapes and initialization are the official ones.

    Args:
        config: a `MambaLMConfig`; its fields may be given as keywords instead.
        device: of the parameters.
        dtype: of the parameters (blocks keep some in float32, as officially).

    Fields of a config:
        - d_model: width of the residual stream (default: 2560).
        - n_layer: number of layers (64).
        - vocab_size: number of tokens (50277).
        - ssm_cfg: "layer", the family of the blocks ("Mamba1", "Mamba2" or "Mamba3"), and fields of its config.
        - d_intermediate: width of a gated MLP after each block (0: none).
        - tie_embeddings: whether the head is the embedding (True).
        - pad_vocab_size_multiple: the number of rows of the embedding is a multiple of this (8).
        - rms_norm: RMSNorm; otherwise LayerNorm (True).
        - residual_in_fp32: keep the residual stream in float32 (True).
        - fused_add_norm: an option of the official kernels that does not change results.
        - attn_layer_idx: attention layers, which are refused.
        - attn_cfg: their options.
        - stack: further fields of `StackConfig`, such as {"n_virtual": 24}.
        - extra: unknown fields of a config file, which are written back.
    """

    def __init__(
        self,
        config: MambaLMConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__()
        if config is not None and fields:
            raise TypeError(f"MambaLM: give a config or its fields, not both; got also {sorted(fields)}")
        if config is not None and not isinstance(config, MambaLMConfig):
            raise TypeError(
                f"MambaLM: config must be a MambaLMConfig, got {type(config).__name__}; MambaLMConfig.from_dict(...) "
                "makes one from a table, MambaLM.from_pretrained(...) loads a directory"
            )
        check_fields(fields)
        self.config = config = config or MambaLMConfig(**fields)
        self.backbone = Backbone(config, device=device, dtype=dtype)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, device=device, dtype=dtype)
        self._initialize()
        self.tie_weights()
        self.register_load_state_dict_pre_hook(before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(after_loading)  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Int[Tensor, "b t"] | None = None,
        cache: LMCache | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        *,
        seq_idx: Int[Tensor, "b t"] | None = None,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        targets: Int[Tensor, "b t"] | None = None,
        hidden_states: Sequence[int] = (),
        logits: Literal["all", "last", "none"] = "all",
        path: SsdPath | None = None,
        context: SequencePart | None = None,
    ) -> LMOutput:
        """Run over a sequence of any length, from any cache to a new one.

        Args:
            input_ids: token ids.
            cache: what the rows (or packed sequences) continue from; a fresh start if not given. It is not changed.
            labels: usually `input_ids` themselves: the logits at each token are compared with the label of the next.
                -100 is ignored, and so are padding and the first token of each sequence.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Logits at the padding are zero.
            seq_idx: for several packed rows, a number for every token: a sequence ends where it changes, and with its
                row. One cache row per sequence, in the order of the rows.
            inputs_embeds: embeddings, in place of token ids.
            targets: in place of labels, the token that each position's logits are compared with, without a shift.
            hidden_states: passes after which the residual stream is also returned; -1 is the last, before the norm.
            logits: of every token, of the last (real) token of each row or packed sequence, or none. Without all
                logits, the loss is computed a few tokens at a time, to save memory.
            path: the scan's algorithm; the default if not given.
            context: this rank's part of sequences that several ranks share (`anymamba.core.context_parallel`);
                with `targets`, because a label belongs to the token before it, which another worker may have.

        Returns:
            logits, loss and nats (None without labels or targets), and the new cache.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: ids or labels out of range, or shapes that do not match.
        """
        given = check_inputs(input_ids, inputs_embeds, self.config.d_model, self.backbone.embedding.weight)
        if context is not None:
            check_mutually_exclusive("MambaLM", "context", labels=labels, seq_idx=seq_idx, mask=mask)
        if seq_idx is not None:
            _, bounds = flatten_packed_rows("MambaLM", given, seq_idx, cu_seqlens, mask)
            tensors = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "labels": labels, "targets": targets}
            packed = {name: None if x is None else x.flatten(0, 1).unsqueeze(0) for name, x in tensors.items()}
            found = self(
                cache=cache, cu_seqlens=bounds, hidden_states=hidden_states, logits=logits, path=path, **packed
            )
            return in_rows(found, given.shape[0], logits)
        padding = None
        if mask is not None:
            padding = Padding.from_mask("MambaLM", mask, given.shape[0], given.shape[1], given.device)
        wanted = find_targets(given.shape[:2], given.device, labels, targets, cu_seqlens, padding)
        if logits not in ("all", "last", "none"):
            raise ValueError(f'MambaLM: logits must be "all", "last" or "none", got {logits!r}')
        hidden_btd, new, *streams = self.backbone(
            input_ids,
            cache,
            inputs_embeds=inputs_embeds,
            wanted=self.backbone.wanted(hidden_states, "MambaLM: hidden_states") if hidden_states else None,
            path=path,
            cu_seqlens=cu_seqlens,
            mask=padding,
            context=context,
        )
        streams = tuple(streams[0]) if streams else ()
        found = None
        if logits != "none":
            found = apply_linear(
                self.lm_head, hidden_btd if logits == "all" else last_hidden(hidden_btd, cu_seqlens, padding)
            )
        if wanted is None:
            return LMOutput(found, None, new, None, streams)
        check_targets(wanted, self._head_width)
        if found is not None and logits == "all":
            nats = cross_entropy_sum(found.flatten(0, 1), wanted)
        else:
            nats = chunked_cross_entropy(self.lm_head, hidden_btd.flatten(0, 1), wanted)
        return LMOutput(found, nats / (wanted != IGNORED_LABEL).sum().clamp(min=1), new, nats, streams)

    def step(self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token per row. `anymamba.decoder(model)` does the same in one call to the compiled kernels.

        Args:
            input_ids: token ids.
            cache: what the rows continue from; a fresh start if not given. It is not changed.

        Returns:
            The logits of the next token, and the new cache.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1:
            found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"MambaLM.step: input_ids must be a tensor (b,), one token per row, got {found}")
        hidden_bd, new = self.backbone(input_ids, cache)
        return apply_linear(self.lm_head, hidden_bd), new

    def states_at(
        self,
        input_ids: Int[Tensor, "b t"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: LMCache | None = None,
        *,
        path: SsdPath | None = None,
    ) -> tuple[Float[Tensor, "b t v"], list[LMCache]]:
        """The logits of every token, and the caches after the first p tokens, for every p of `positions` (1 to t).

        Raises:
            TypeError: a position is not a whole number.
            ValueError: there is no such position.
        """
        check_ids(input_ids)

        def prefill(part: Tensor, before: Any) -> tuple[Any, LMCache]:
            found = self(part, before, path=path)
            return found.logits, found.cache

        return prefill_with_states_at("MambaLM.states_at", prefill, input_ids, positions, cache)

    def record(self, program: Program) -> None:
        """Describe `step` after the embedding to the compiled kernels, which may refuse."""
        program.check_plain(self, MambaLM)
        backbone = program.child(self, "backbone", Backbone)
        backbone.record(program)
        width, hidden = program.input_width, backbone.record_norm(program)
        program.linear(hidden, self, "lm_head", width, self._head_width, to=-1)

    def init_cache(self, batch_size: int) -> LMCache:
        """The cache of a fresh start."""
        return self.backbone.init_cache(batch_size)  # type: ignore[return-value]

    def tie_weights(self) -> None:
        """Make the head the embedding, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight
            if isinstance(self.backbone.embedding, QuantizedWeight):
                self.lm_head.scales = self.backbone.embedding.scales

    @property
    def _head_width(self) -> int:
        """Logits of a token; an adapter around the head need not say it."""
        return int(getattr(self.lm_head, "out_features", self.config.padded_vocab_size))

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
        """The dtype of the activations, which the embedding returns."""
        embedding = self.backbone.embedding
        return embedding.dtype if isinstance(embedding, QuantizedWeight) else embedding.weight.dtype

    def fingerprint(self) -> str:
        """A name for these weights in this dtype and what is computed with them.

        State files record it, so that a state is not used with another model (`anymamba.models.fingerprint`).
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
        weights: str | None = None,
        ssm_cfg: dict[str, Any] | None = None,
    ) -> MambaLM:
        """Load a checkpoint: a directory, or the id of a repository on the hub.

        Args:
            source: a directory in any of `anymamba.checkpoints.formats`, or "owner/name".
            dtype: of the parameters and activations; the file's if not given.
            device: of the parameters.
            weights: store the projections, the embedding and the head in fewer bits: "bfloat16", "float16", "int8" or
                "int4" (`core/weight_formats.py`). `dtype` then applies to the activations and all other parameters.
            mapped: leave weights of the same dtype in the file, which must then stay as it is: if it is overwritten in
                place the model changes, and if it is cut short the process ends. Saves memory and the time to copy.
            ssm_cfg: options of the blocks that override the config's.

        Warns of weights that are not finite, unless they are mapped, and of a Mamba-3 whose activation is unknown.
        """
        # The file formats are built on this module, so they cannot be imported above it.
        from anymamba.checkpoints.load import load_model
        from anymamba.models.mamba3_activation import warn_if_ambiguous

        model = load_model(source, dtype=dtype, device=device, mapped=mapped, weights=weights, ssm_cfg=ssm_cfg)
        warn_if_ambiguous(str(source), model.config, 'ssm_cfg={"a_activation": "softplus"}, or "heavy_tail" to agree')
        return model

    def save_pretrained(self, directory: str | os.PathLike[str], *, format: str | None = None) -> None:
        """Write config and weights in one of `anymamba.checkpoints.formats`.

        Args:
            directory: created if it does not exist.
            format: "official" if not given, or "anymamba" for stacks that the official config cannot express.

        Raises:
            ValueError: the format cannot represent the model, or the weights do not fit the config; nothing is written.
        """
        from anymamba.checkpoints.load import save_model

        save_model(self, directory, format)

    def push_to_hub(
        self,
        name: str,
        *,
        companions: str | os.PathLike[str] | None = None,
        format: str | None = None,
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Write config, weights and a card to a repository of the Hugging Face hub, in one commit.

        Args:
            name: "owner/name"; the repository is created if it does not exist.
            companions: directory of the tokenizer's files, which are written too, and of a README.md if it has one.
            format: as for `save_pretrained`.
            private: whether a new repository is private.
            token: access token; the one of `hf auth login` if not given.

        Returns:
            The address of the commit.

        Raises:
            ValueError: the format cannot represent the model, `huggingface_hub` is missing, or the hub refuses.
        """
        from anymamba.checkpoints.push import push_model

        return push_model(self, name, companions=companions, format=format, private=private, token=token)

    def generate(
        self, input_ids: Int[Tensor, "b t"] | None = None, max_new_tokens: int = 128, **options: Any
    ) -> Generation:
        """Continue token sequences: `anymamba.generate` with this model, which has the options."""
        # Generation is a room above the models; this method is a door to it, opened when it is called.
        from anymamba.generation import generate

        return generate(self, input_ids, max_new_tokens, **options)

    def _initialize(self) -> None:
        """Initialize the embedding with N(0, 0.02), and the stack like any stack."""
        nn.init.normal_(self.backbone.embedding.weight, std=0.02)
        self.backbone.initialize()
