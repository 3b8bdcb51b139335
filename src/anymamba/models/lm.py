"""Language model: embedding, a stack of residual layers, a norm and a head, with the official names.

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

from anymamba.blocks.block_inputs import flatten_packed_rows, prefill_with_states_at
from anymamba.core.checks import check_mutually_exclusive
from anymamba.core.context_parallel import SequencePart
from anymamba.core.layout import Padding
from anymamba.core.linear import apply_linear
from anymamba.core.weight_formats import QuantizedWeight
from anymamba.kernels.step_description import OUTPUT, StepBuilder
from anymamba.models.backbone import Backbone, after_loading, before_loading
from anymamba.models.cache import LMCache
from anymamba.models.config import MambaLMConfig, check_fields, warn_if_ambiguous
from anymamba.models.inputs import check_ids, check_inputs, check_label_range
from anymamba.models.loss import IGNORED_LABEL, chunked_cross_entropy, cross_entropy_sum
from anymamba.models.outputs import LMOutput, find_targets, last_hidden, unflatten_packed_rows
from anymamba.models.token_window import TokenWindow, check_window, unroll_window
from anymamba.models.trainer_methods import HasTrainerMethods, merge_masks
from anymamba.scan import SsdPath

if TYPE_CHECKING:
    from anymamba.generation import Generation


class MambaLM(HasTrainerMethods):
    """Mamba language model. Parameter names, shapes and initialization are the official ones.

    Args:
        config: `MambaLMConfig`; its fields may be given as keywords instead.
        device: Device of the parameters.
        dtype: Dtype of the parameters (blocks keep some in float32, like the official ones).

    Fields of a config:
        - d_model: Width of the residual stream (default: 2560).
        - n_layer: Number of layers (64).
        - vocab_size: Number of tokens (50277).
        - ssm_cfg: Table with "layer", the family of the blocks ("Mamba1", "Mamba2" or "Mamba3"), and fields of its
          config.
        - d_intermediate: Width of a gated MLP after each block (0: none).
        - tie_embeddings: Whether the head is the embedding (True).
        - pad_vocab_size_multiple: Number of which the rows of the embedding are a multiple (8).
        - rms_norm: RMSNorm; otherwise LayerNorm (True).
        - residual_in_fp32: Whether to keep the residual stream in float32 (True).
        - fused_add_norm: Option of the official kernels that does not change results.
        - attn_layer_idx: Layers whose block is attention, in place of the family in `ssm_cfg` ([]).
        - attn_cfg: Table with fields of `AttentionConfig`, for those layers.
        - stack: Further fields of `StackConfig`, such as {"n_virtual": 24}.
        - extra: Unknown fields of a config file, which are written back.
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
                "creates one from a table, MambaLM.from_pretrained(...) loads a directory"
            )
        check_fields(fields)
        self.config = config = config or MambaLMConfig(**fields)
        self.backbone = Backbone(config, device=device, dtype=dtype)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.backbone.embedding.weight, std=0.02)
        self.backbone.initialize()
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
        attention_mask: Bool[Tensor, "b t"] | Int[Tensor, "b t"] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LMOutput:
        """Run over a sequence of any length, from any cache to a new one.

        Args:
            input_ids: Token ids.
            cache: Cache that the rows (or packed sequences) continue from; an empty one if not given. It is unchanged.
            labels: Usually `input_ids` themselves: the logits at each token are compared with the label of the next.
                -100 is ignored, and so are padding and the first token of each sequence.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            mask: For padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Logits at the padding are zero.
            seq_idx: For several packed rows, an integer per token: a sequence ends where it changes, and with its row.
                One cache row per sequence, in the order of the rows.
            inputs_embeds: Embeddings, in place of token ids.
            targets: In place of labels, the token that the logits at each position are compared with, without a shift.
            hidden_states: Passes after which the residual stream is also returned; -1 is the last, before the norm.
            logits: Which logits to return: of every token, of the last (real) token of each row or packed sequence, or
                none. Without all logits, the loss is computed a few tokens at a time, to save memory.
            path: Algorithm of the scan; the default one if not given.
            context: Part of this rank, for sequences that several ranks share (`anymamba.core.context_parallel`). It
                requires `targets`, because a label belongs to the previous token, which may be on another rank.
            attention_mask: The name of a mask (b, t) in transformers, with 1 or True for real tokens.
            output_attentions: False or None; PEFT passes these three.
            output_hidden_states: False or None; `hidden_states` names passes.
            return_dict: Anything: the output is a tuple and has names.

        Returns:
            logits, loss and nats (None without labels or targets), and the new cache.

        Raises:
            TypeError: An argument has the wrong type or dtype.
            ValueError: Ids or labels are out of range, or shapes do not match.
        """
        # 1) Check the inputs; run rows of packed sequences as one row.
        mask = merge_masks(mask, attention_mask, output_attentions, output_hidden_states)
        inputs = check_inputs(input_ids, inputs_embeds, self.config.d_model, self.backbone.embedding.weight)
        if context is not None:
            check_mutually_exclusive("MambaLM", "context", labels=labels, seq_idx=seq_idx, mask=mask)
        if seq_idx is not None:
            _, cu_seqlens = flatten_packed_rows("MambaLM", inputs, seq_idx, cu_seqlens, mask)
            rows = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "labels": labels, "targets": targets}
            row = {name: None if x is None else x.flatten(0, 1).unsqueeze(0) for name, x in rows.items()}
            output = self(
                cache=cache, cu_seqlens=cu_seqlens, hidden_states=hidden_states, logits=logits, path=path, **row
            )
            return unflatten_packed_rows(output, inputs.shape[0], logits)
        padding = None
        if mask is not None:
            padding = Padding.from_mask("MambaLM", mask, inputs.shape[0], inputs.shape[1], inputs.device)
        targets_m = find_targets(inputs.shape[:2], inputs.device, labels, targets, cu_seqlens, padding)
        if logits not in ("all", "last", "none"):
            raise ValueError(f'MambaLM: logits must be "all", "last" or "none", got {logits!r}')
        # 2) Run the stack.
        hidden_btd, new_cache, *requested = self.backbone(
            input_ids,
            cache,
            inputs_embeds=inputs_embeds,
            requested=self.backbone.pass_indices(hidden_states, "MambaLM: hidden_states") if hidden_states else None,
            path=path,
            cu_seqlens=cu_seqlens,
            mask=padding,
            context=context,
        )
        streams = tuple(requested[0]) if requested else ()
        # 3) The requested logits.
        logits_btv = None
        if logits != "none":
            head_input = hidden_btd if logits == "all" else last_hidden(hidden_btd, cu_seqlens, padding)
            logits_btv = apply_linear(self.lm_head, head_input)
        if targets_m is None:
            return LMOutput(logits_btv, None, new_cache, None, streams)
        # 4) The loss, from all logits if they exist.
        check_label_range("MambaLM", targets_m, self._head_width, IGNORED_LABEL)
        if logits_btv is not None and logits == "all":
            nats = cross_entropy_sum(logits_btv.flatten(0, 1), targets_m)
        else:
            nats = chunked_cross_entropy(self.lm_head, hidden_btd.flatten(0, 1), targets_m)
        loss = nats / (targets_m != IGNORED_LABEL).sum().clamp(min=1)
        return LMOutput(logits_btv, loss, new_cache, nats, streams)

    def step(self, input_ids: Int[Tensor, " b"], cache: LMCache | None = None) -> tuple[Float[Tensor, "b v"], LMCache]:
        """Run over one token per row. `anymamba.decoder(model)` does the same in one call to the compiled kernels.

        Args:
            input_ids: Token ids.
            cache: Cache that the rows continue from; an empty one if not given. It is unchanged.

        Returns:
            The logits of the next token, and the new cache.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 1:
            received = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ValueError(f"MambaLM.step: input_ids must be a tensor (b,), one token per row, got {received}")
        hidden_bd, new_cache = self.backbone(input_ids, cache)
        return apply_linear(self.lm_head, hidden_bd), new_cache

    def step_window(self, input_ids: Int[Tensor, "b k"], cache: LMCache | None = None) -> TokenWindow:
        """Run over several tokens per row, of which any number may count afterwards: as many calls of `step`.

        `anymamba.decoder(model)` reads the weights once for all of them, with the same bits as its own `step`.

        Args:
            input_ids: Token ids of each row, up to 64.
            cache: Cache that the rows continue from; an empty one if not given. It is unchanged.

        Returns:
            The logits after each token, and the cache after any number of them: `window.cache_after(counts)`.
        """
        check_window("MambaLM.step_window", input_ids)
        return unroll_window(self.step, input_ids, self.init_cache(input_ids.shape[0]) if cache is None else cache)

    def states_at(
        self,
        input_ids: Int[Tensor, "b t"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: LMCache | None = None,
        *,
        path: SsdPath | None = None,
    ) -> tuple[Float[Tensor, "b t v"], list[LMCache]]:
        """Return the logits of every token, and the caches after the first p tokens for every p of `positions`.

        Args:
            input_ids: Token ids.
            positions: Numbers of tokens, 1 to t, in any order.
            cache: Cache to continue from; an empty one if not given.
            path: Algorithm of the scan; the default one if not given.

        Raises:
            TypeError: A position is not an integer.
            ValueError: There is no such position.
        """
        check_ids(input_ids)

        def prefill(part: Tensor, part_cache: Any) -> tuple[Any, LMCache]:
            output = self(part, part_cache, path=path)
            return output.logits, output.cache

        return prefill_with_states_at("MambaLM.states_at", prefill, input_ids, positions, cache)

    def describe_step(self, builder: StepBuilder) -> None:
        """Describe `step` after the embedding: from the residual stream in slot 0 to the logits."""
        backbone = self._describe_layers(builder)
        width, hidden = builder.input_width, backbone.describe_norm(builder)
        builder.linear(hidden, self, "lm_head", width, self._head_width, to=OUTPUT)

    def describe_read(self, builder: StepBuilder) -> None:
        """Describe a step for its cache alone: no logits, the output is the residual stream."""
        self._describe_layers(builder)
        builder.write(0, builder.input_width)

    def _describe_layers(self, builder: StepBuilder) -> Backbone:
        builder.check_unmodified(self, MambaLM)
        backbone: Backbone = builder.submodule(self, "backbone", Backbone)
        backbone.describe_step(builder)
        return backbone

    def init_cache(self, batch_size: int) -> LMCache:
        """Return the empty cache."""
        return self.backbone.init_cache(batch_size)  # type: ignore[return-value]

    def tie_weights(self) -> None:
        """Make the head share its weight with the embedding, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight
            if isinstance(self.backbone.embedding, QuantizedWeight):
                self.lm_head.scales = self.backbone.embedding.scales

    @property
    def _head_width(self) -> int:
        """Number of logits per token; an adapter around the head may lack `out_features`."""
        return int(getattr(self.lm_head, "out_features", self.config.padded_vocab_size))

    @property
    def is_tied(self) -> bool:
        """Return whether head and embedding are one parameter at present."""
        head: Tensor | None = getattr(self.lm_head, "weight", None)
        return head is not None and head is getattr(self.backbone.embedding, "weight", None)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.backbone.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations, which is that of the embeddings."""
        embedding = self.backbone.embedding
        return embedding.dtype if isinstance(embedding, QuantizedWeight) else embedding.weight.dtype

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
            source: Directory in any supported checkpoint format, or "owner/name".
            dtype: Dtype of the parameters and activations; that of the file if not given.
            device: Device of the parameters; "auto" is the first of cuda, mps and cpu that is available.
            mapped: Whether to leave weights of the same dtype in the file, to save memory and the time to copy. The
                file must then not change: overwriting it in place changes the model, truncating it ends the process.
            weights: Format in which to store projections, embedding and head: "bfloat16", "float16", "int8" or "int4".
                `dtype` then applies to the activations and all other parameters.
            ssm_cfg: Options of the blocks that override those of the config.

        Warns of weights that are not finite, unless they are mapped, and of a Mamba-3 whose activation is unknown.
        """
        # Imported lazily: checkpoint formats depend on models, not the other way round.
        from anymamba.checkpoints.load import load_model

        model = load_model(source, dtype=dtype, device=device, mapped=mapped, weights=weights, ssm_cfg=ssm_cfg)
        warn_if_ambiguous(str(source), model.config, 'ssm_cfg={"a_activation": "softplus"}, or "heavy_tail" to agree')
        return model

    def save_pretrained(self, directory: str | os.PathLike[str], *, format: str | None = None) -> None:
        """Write config and weights in a checkpoint format.

        Args:
            directory: Target directory, created if it does not exist.
            format: Name of the format; "official" if not given, or "anymamba" for stacks that the official config
                cannot express.

        Raises:
            ValueError: The format cannot represent the model, or the weights do not match the config; nothing is
                written.
        """
        from anymamba.checkpoints.save import save_model

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
            name: Repository, "owner/name"; created if it does not exist.
            companions: Directory with the files of the tokenizer, and a README.md if it has one; they are written, too.
            format: Name of the checkpoint format, as in `save_pretrained`.
            private: Whether a new repository is private.
            token: Access token; the one of `hf auth login` if not given.

        Returns:
            The URL of the commit.

        Raises:
            ValueError: The format cannot represent the model, `huggingface_hub` is missing, or the hub rejects the
                upload.
        """
        from anymamba.checkpoints.save import push_model

        return push_model(self, name, companions=companions, format=format, private=private, token=token)

    def generate(
        self, input_ids: Int[Tensor, "b t"] | None = None, max_new_tokens: int = 128, **options: Any
    ) -> Generation:
        """Continue token sequences: `anymamba.generate(self, ...)`, whose options these are."""
        # Imported lazily: generation depends on models, not the other way round.
        from anymamba.generation import generate

        return generate(self, input_ids, max_new_tokens, **options)
