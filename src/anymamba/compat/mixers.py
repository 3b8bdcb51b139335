"""The official blocks: one of ours each, with the same parameters, under the official constructor.

Letters: b batch, t time, d d_model.

§ What the official blocks share: `inference_params`, and states that are changed in place.

The states hold what our caches hold, and are float32 or wider where our caches are.

Letters: b batch, t time, d d_model.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from anymamba.blocks.base import Block
from anymamba.blocks.layers import GatedRMSNorm
from anymamba.blocks.mamba1 import Mamba1, Mamba1Config
from anymamba.blocks.mamba2 import Mamba2 as OurMamba2
from anymamba.blocks.mamba2 import Mamba2Config
from anymamba.blocks.mamba3 import Mamba3 as OurMamba3
from anymamba.blocks.mamba3 import Mamba3Config
from anymamba.compat.seq_idx import Packing, in_one_row


class OfficialBlock(Block):
    """What the official blocks have besides their constructors.

    Attributes:
        FIELDS: the fields of the cache in the order of the official states.
        layer_idx: the key under which `inference_params` keeps the states.
    """

    FIELDS: tuple[str, ...]
    layer_idx: int | None

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """The states of a fresh start; `max_seqlen` does not matter to them."""
        cache = self.init_cache(batch_size, dtype)
        return tuple(getattr(cache, name).detach() for name in self.FIELDS)

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, ...]:
        """The states that `inference_params` keeps for this layer, made if there are none."""
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__}: layer_idx must be given to use inference_params")
        kept: dict[Any, Any] = inference_params.key_value_memory_dict
        if self.layer_idx not in kept or initialize_states:
            kept[self.layer_idx] = self.allocate_inference_cache(batch_size, 1)
        states: tuple[Tensor, ...] = kept[self.layer_idx]
        return states

    def _sequence(
        self, u: Tensor, inference_params: Any, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """(b, t, d) -> (b, t, d), from a fresh start or from the states that `inference_params` keeps."""
        if seq_idx is not None and cu_seqlens is None:
            b, t = u.shape[:2]
            packing = Packing.of(type(self).__name__, seq_idx, b, t)
            if inference_params is not None:
                raise NotImplementedError(
                    f"mamba_ssm.{type(self).__name__}: seq_idx with inference_params; pass cu_seqlens"
                )
            y, _ = self.prefill(in_one_row(u), cu_seqlens=packing.cu_seqlens)
            return y.squeeze(0).unflatten(0, (b, t))
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(u.device)
        if inference_params is None:
            y, _ = self.prefill(u, cu_seqlens=cu_seqlens)
            return y
        rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = self._get_states_from_cache(inference_params, rows)
        cache = self._cache(states) if inference_params.seqlen_offset > 0 else None
        y, new = self.prefill(u, cache, cu_seqlens=cu_seqlens)
        self._write(states, new)
        return y

    def _step(self, u: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One token, (b, d) or (b, 1, d), from states that are changed in place; they are returned with the output."""
        if u.ndim == 3 and u.shape[1] != 1:
            raise ValueError(f"{type(self).__name__}.step: expected one token, got {u.shape[1]}")
        y, new = self.prefill(u if u.ndim == 3 else u.unsqueeze(1), self._cache(states))
        self._write(states, new)
        return (y if u.ndim == 3 else y.squeeze(1), *states)

    def _cache(self, states: tuple[Tensor, ...]) -> Any:
        """Official states as our cache."""
        like = self.reference_tensor().dtype
        return self.CACHE(**{n: x.to(self._field_dtype(n, like)) for n, x in zip(self.FIELDS, states, strict=True)})

    def _write(self, states: tuple[Tensor, ...], cache: Any) -> None:
        with torch.no_grad():
            for name, state in zip(self.FIELDS, states, strict=True):
                state.copy_(getattr(cache, name))


_EXTENSIONS = ("a_activation", "rotation", "rotation_range", "dt_limit", "learnable_init_states", "bias")


class Mamba(OfficialBlock, Mamba1):
    """The official Mamba-1 block: `anymamba.Mamba1`. `use_fast_path` does not change results."""

    FIELDS = ("conv", "ssm")

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int | float = 2,
        dt_rank: Any = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: Any = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialize the parameters."""
        config = Mamba1Config(
            d_model=d_model,
            d_state=d_state,
            d_conv=d_conv,
            expand=expand,
            dt_rank=dt_rank,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init=dt_init,
            dt_scale=dt_scale,
            dt_init_floor=dt_init_floor,
            conv_bias=conv_bias,
            bias=bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.use_fast_path = layer_idx, use_fast_path
        self.dt_rank, self.activation = config.dt_width, "silu"

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # type: ignore[override]
        """(b, t, d) -> (b, t, d)."""
        return self._sequence(hidden_states, inference_params)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """One token (b, 1, d): its output and the two states, which are changed in place."""
        return self._step(hidden_states, (conv_state, ssm_state))


class Mamba2(OfficialBlock, OurMamba2):
    """The official Mamba-2 block: `anymamba.Mamba2`.

    `chunk_size`, `use_mem_eff_path` and `sequence_parallel` change no result; there is no `process_group`.
    """

    FIELDS = ("conv", "ssm")

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int | float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: Any = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: Any = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialize the parameters."""
        if process_group is not None:
            raise NotImplementedError("mamba_ssm.Mamba2 with a process_group")
        config = Mamba2Config(
            d_model=d_model,
            d_state=d_state,
            d_conv=d_conv,
            conv_init=conv_init,
            expand=expand,
            headdim=headdim,
            d_ssm=d_ssm,
            ngroups=ngroups,
            A_init_range=tuple(A_init_range),
            D_has_hdim=D_has_hdim,
            rmsnorm=rmsnorm,
            norm_before_gate=norm_before_gate,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_limit=tuple(dt_limit),
            bias=bias,
            conv_bias=conv_bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.use_mem_eff_path, self.activation = layer_idx, use_mem_eff_path, "silu"
        self.chunk_size, self.d_ssm = chunk_size, config.ssm_width

    def forward(  # type: ignore[override]
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """(b, t, d) -> (b, t, d), or with `seqlen` (b t, d) -> (b t, d).

        Args:
            u: inputs.
            seqlen: t, of rows that lie end to end.
            seq_idx: which sequence of its row a token belongs to, (b, t).
            cu_seqlens: boundaries of sequences in a batch of one; each has its own state in `inference_params`.
            inference_params: holds the states of all layers.
        """
        if seqlen is None:
            return self._sequence(u, inference_params, seq_idx, cu_seqlens)
        return self._sequence(u.unflatten(0, (-1, seqlen)), inference_params, seq_idx, cu_seqlens).flatten(0, 1)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """One token (b, 1, d): its output and the two states, which are changed in place."""
        return self._step(hidden_states, (conv_state, ssm_state))


class Mamba2Simple(OfficialBlock, OurMamba2):
    """The official short form of Mamba-2: gate first, and a norm over all channels."""

    FIELDS = ("conv", "ssm")

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int | float = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: Any = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: Any = (0.0, float("inf")),
        learnable_init_states: bool = False,
        activation: str = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialize the parameters."""
        if activation not in ("silu", "swish"):
            raise ValueError(f'Mamba2Simple: activation must be "silu" or "swish", got {activation!r}')
        config = Mamba2Config(
            d_model=d_model,
            d_state=d_state,
            d_conv=d_conv,
            conv_init=conv_init,
            expand=expand,
            headdim=headdim,
            ngroups=ngroups,
            A_init_range=tuple(A_init_range),
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            dt_limit=tuple(dt_limit),
            learnable_init_states=learnable_init_states,
            bias=bias,
            conv_bias=conv_bias,
        )
        super().__init__(config, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(config.d_inner, device=device, dtype=dtype)
        self.layer_idx, self.activation, self.chunk_size = layer_idx, activation, chunk_size

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(b, t, d) -> (b, t, d); `seq_idx` (b, t) says which sequence of its row a token belongs to."""
        return self._sequence(u, None, seq_idx)


class Mamba3(OfficialBlock, OurMamba3):
    """The official Mamba-3 block: `anymamba.Mamba3`, whose further options may be given as keywords.

    `fuse_pregate_headwise_norm`, `chunk_size`, `dropout`, `n_layer` and, with a warning, unknown keywords do not change
    results.
    """

    FIELDS = ("rotation", "ssm", "k", "v")

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int | float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int = 64,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Create and initialize the parameters."""
        if unknown := sorted(kwargs.keys() - set(_EXTENSIONS)):
            warnings.warn(f"Mamba3 has no option {', '.join(unknown)}: ignored", stacklevel=2)
        config = Mamba3Config(
            d_model=d_model,
            d_state=d_state,
            expand=expand,
            headdim=headdim,
            ngroups=ngroups,
            rope_fraction=rope_fraction,
            dt_min=dt_min,
            dt_max=dt_max,
            dt_init_floor=dt_init_floor,
            A_floor=A_floor,
            is_outproj_norm=is_outproj_norm,
            is_mimo=is_mimo,
            mimo_rank=mimo_rank,
            **{name: value for name, value in kwargs.items() if name in _EXTENSIONS},
        )
        super().__init__(config, device=device, dtype=dtype)
        self.layer_idx, self.chunk_size = layer_idx, chunk_size
        self.mimo_rank = config.rank

    def forward(  # type: ignore[override]
        self, u: Tensor, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, inference_params: Any = None
    ) -> Tensor:
        """(b, t, d) -> (b, t, d); arguments as for `Mamba2`."""
        return self._sequence(u, inference_params, seq_idx, cu_seqlens)

    def step(  # type: ignore[override]
        self, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """One token (b, d) or (b, 1, d): its output and the four states, which are changed in place."""
        return self._step(u, (angle_state, ssm_state, k_state, v_state))

    def allocate_inference_cache(  # type: ignore[override]
        self,
        batch_size: int,
        max_seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        inplace_state: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """The states of a fresh start: angles, state, last key, last value."""
        states = super().allocate_inference_cache(batch_size, max_seqlen, dtype)
        return states if device is None else tuple(state.to(device) for state in states)
