"""The official blocks: each is one of ours with the same parameters, under the official constructor.

A constructor is made from the fields of our config (`official_constructor`), which have the official names and
defaults. The states hold what our caches hold, are changed in place, and are float32 or wider where our caches are.

Letters: b batch, t time, d d_model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.layers import GatedRMSNorm
from anymamba.blocks.mamba1 import Mamba1
from anymamba.blocks.mamba2 import Mamba2 as OurMamba2
from anymamba.blocks.mamba3 import Mamba3 as OurMamba3
from anymamba.compat.seq_idx import Packing, in_one_row
from anymamba.compat.vim import BimambaType, add_backward_parameters, run_both_directions

_Class = TypeVar("_Class", bound="type[OfficialBlock]")


def official_constructor(parameters: str, **defaults: Any) -> Callable[[_Class], _Class]:
    """Return a decorator that gives a block the constructor of the official one.

    Args:
        parameters: Names of the official parameters, in order. The default of a parameter is that of the config field
            of this name, or None if there is no such field.
        defaults: Defaults that differ.
    """

    def decorate(kind: _Class) -> _Class:
        known = {field.name: field.default for field in dataclasses.fields(kind.CONFIG)} | defaults
        signature = inspect.Signature([_parameter(name, known) for name in ["self", *parameters.split()]])

        @functools.wraps(kind.__init__, assigned=("__module__", "__name__", "__doc__"), updated=())
        def construct(self: OfficialBlock, *args: Any, **kwargs: Any) -> None:
            try:
                call = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{kind.__name__}: {error}") from None
            call.apply_defaults()
            self._construct(**{name: value for name, value in call.arguments.items() if name != "self"})

        construct.__signature__ = signature  # type: ignore[attr-defined]
        construct.__qualname__ = f"{kind.__qualname__}.__init__"
        kind.__init__ = construct  # type: ignore[assignment]
        return kind

    return decorate


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    if name.startswith("**"):
        return inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD)
    default = inspect.Parameter.empty if name == "self" else defaults.get(name)
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


class OfficialBlock(Block):
    """Common part of the official blocks: construction, and states in `inference_params` or in place.

    Attributes:
        STATES: Fields of our cache, in the order of the official states.
        layer_idx: Key under which `inference_params` keeps the states.
    """

    STATES: tuple[str, ...] = ("conv", "ssm")
    layer_idx: int | None

    def _construct(self, *, device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        """Create the parameters from official arguments; those that are not in our config become attributes.

        `chunk_size` tunes the official kernels; that of our config chooses an algorithm, so it is not the same thing.
        """
        fields = {field.name: field for field in dataclasses.fields(self.CONFIG) if field.name != "chunk_size"}
        values = {
            name: tuple(value) if isinstance(fields[name].default, tuple) else value
            for name, value in arguments.items()
            if name in fields
        }
        super().__init__(self.CONFIG(**values), device=device, dtype=dtype)  # type: ignore[call-arg]
        for name in arguments.keys() - values.keys():
            setattr(self, name, arguments[name])

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Return the states of an empty cache; `max_seqlen` does not matter to them."""
        cache = self.init_cache(batch_size, dtype)
        return tuple(getattr(cache, name).detach() for name in self.STATES)

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the states that `inference_params` keeps for this layer; allocate them if there are none."""
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__}: layer_idx must be given to use inference_params")
        states_of_layer: dict[Any, tuple[Tensor, ...]] = inference_params.key_value_memory_dict
        if self.layer_idx not in states_of_layer or initialize_states:
            states_of_layer[self.layer_idx] = self.allocate_inference_cache(batch_size, 1)
        return states_of_layer[self.layer_idx]

    def _run_sequence(
        self, u: Tensor, inference_params: Any, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Map (b, t, d) to (b, t, d), from an empty cache or from the states that `inference_params` keeps."""
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
        cache = self._as_cache(states) if inference_params.seqlen_offset > 0 else None
        y, new_cache = self.prefill(u, cache, cu_seqlens=cu_seqlens)
        self._write_states(states, new_cache)
        return y

    def _run_step(self, u: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one token, (b, d) or (b, 1, d); return its output and the states, which are changed in place."""
        if u.ndim == 3 and u.shape[1] != 1:
            raise ValueError(f"{type(self).__name__}.step: expected one token, got {u.shape[1]}")
        y, new_cache = self.prefill(u if u.ndim == 3 else u.unsqueeze(1), self._as_cache(states))
        self._write_states(states, new_cache)
        return (y if u.ndim == 3 else y.squeeze(1), *states)

    def _as_cache(self, states: tuple[Tensor, ...]) -> Any:
        """Return official states as our cache."""
        like = self.reference_tensor().dtype
        pairs = zip(self.STATES, states, strict=True)
        return self.CACHE(**{name: state.to(self._field_dtype(name, like)) for name, state in pairs})

    def _write_states(self, states: tuple[Tensor, ...], cache: Any) -> None:
        with torch.no_grad():
            for name, state in zip(self.STATES, states, strict=True):
                state.copy_(getattr(cache, name))


@official_constructor(
    "d_model d_state d_conv expand dt_rank dt_min dt_max dt_init dt_scale dt_init_floor conv_bias bias use_fast_path "
    "layer_idx device dtype bimamba_type if_divide_out init_layer_scale",
    use_fast_path=True,
    bimamba_type="none",
    if_divide_out=False,
)
class Mamba(OfficialBlock, Mamba1):
    """Official Mamba-1 block: `anymamba.Mamba1`. `use_fast_path` does not change results.

    The three arguments after `dtype` are those of Vim's version: a second direction, and a scale of the output.
    """

    gamma: nn.Parameter | None

    def _construct(
        self, *, bimamba_type: BimambaType = "none", init_layer_scale: float | None = None, **arguments: Any
    ) -> None:
        super()._construct(**arguments, bimamba_type=bimamba_type)
        self.dt_rank = self.config.dt_width
        self.activation = "silu"
        add_backward_parameters(self, bimamba_type, init_layer_scale)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # type: ignore[override]
        """Map (b, t, d) to (b, t, d)."""
        if self.bimamba_type == "none":
            y = self._run_sequence(hidden_states, inference_params)
        elif inference_params is None:
            y = run_both_directions(self, hidden_states)
        else:
            raise NotImplementedError("mamba_ssm.Mamba with a bimamba_type and inference_params: it reads later tokens")
        return y if self.gamma is None else y * self.gamma

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one token (b, 1, d); return its output and the two states, which are changed in place."""
        return self._run_step(hidden_states, (conv_state, ssm_state))


@official_constructor(
    "d_model d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim rmsnorm norm_before_gate "
    "dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size use_mem_eff_path layer_idx process_group "
    "sequence_parallel device dtype",
    chunk_size=256,
    use_mem_eff_path=True,
    sequence_parallel=True,
)
class Mamba2(OfficialBlock, OurMamba2):
    """Official Mamba-2 block: `anymamba.Mamba2`.

    `chunk_size`, `use_mem_eff_path` and `sequence_parallel` do not change results; `process_group` is not supported.
    """

    def _construct(self, *, process_group: Any = None, **arguments: Any) -> None:
        if process_group is not None:
            raise NotImplementedError("mamba_ssm.Mamba2 with a process_group")
        super()._construct(**arguments)
        self.d_ssm = self.config.ssm_width
        self.activation = "silu"

    def forward(  # type: ignore[override]
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Map (b, t, d) to (b, t, d), or with `seqlen` (b t, d) to (b t, d).

        Args:
            u: Inputs.
            seqlen: Length t of the rows, if u holds them end to end.
            seq_idx: Sequence that each token of a row belongs to, (b, t).
            cu_seqlens: Boundaries of sequences in a batch of one; each has its own state in `inference_params`.
            inference_params: Container of the states of all layers.
        """
        if seqlen is None:
            return self._run_sequence(u, inference_params, seq_idx, cu_seqlens)
        return self._run_sequence(u.unflatten(0, (-1, seqlen)), inference_params, seq_idx, cu_seqlens).flatten(0, 1)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Run one token (b, 1, d); return its output and the two states, which are changed in place."""
        return self._run_step(hidden_states, (conv_state, ssm_state))


@official_constructor(
    "d_model d_state d_conv conv_init expand headdim ngroups A_init_range dt_min dt_max dt_init_floor dt_limit "
    "learnable_init_states activation bias conv_bias chunk_size use_mem_eff_path layer_idx device dtype",
    d_state=64,
    headdim=128,
    activation="swish",
    chunk_size=256,
    use_mem_eff_path=True,
)
class Mamba2Simple(OfficialBlock, OurMamba2):
    """Official short form of Mamba-2: gate first, and a norm over all channels."""

    def _construct(self, *, activation: str = "swish", device: Any = None, dtype: Any = None, **arguments: Any) -> None:
        if activation not in ("silu", "swish"):
            raise ValueError(f'Mamba2Simple: activation must be "silu" or "swish", got {activation!r}')
        super()._construct(device=device, dtype=dtype, activation=activation, **arguments)
        self.norm = GatedRMSNorm(self.config.d_inner, device=device, dtype=dtype)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map (b, t, d) to (b, t, d); `seq_idx` (b, t) is the sequence that each token of a row belongs to."""
        return self._run_sequence(u, None, seq_idx)


_EXTENSIONS = frozenset({"a_activation", "rotation", "rotation_range", "dt_limit", "learnable_init_states", "bias"})


@official_constructor(
    "d_model d_state expand headdim ngroups rope_fraction dt_min dt_max dt_init_floor A_floor is_outproj_norm is_mimo "
    "mimo_rank fuse_pregate_headwise_norm chunk_size dropout layer_idx n_layer device dtype **kwargs",
    fuse_pregate_headwise_norm=True,
    chunk_size=64,
    dropout=0.0,
)
class Mamba3(OfficialBlock, OurMamba3):
    """Official Mamba-3 block: `anymamba.Mamba3`, whose further options may be given as keywords.

    `fuse_pregate_headwise_norm`, `chunk_size`, `dropout`, `n_layer` and, with a warning, unknown keywords do not change
    results.

    Attributes:
        default_a_activation: Activation of the decay rates if the keywords name none; `install` sets it.
    """

    STATES = ("rotation", "ssm", "k", "v")
    default_a_activation: ClassVar[str] = "heavy_tail"

    def _construct(self, *, kwargs: dict[str, Any] | None = None, **arguments: Any) -> None:
        kwargs = kwargs or {}
        if unknown := sorted(kwargs.keys() - _EXTENSIONS):
            warnings.warn(f"Mamba3 has no option {', '.join(unknown)}: ignored", stacklevel=3)
        extensions = {"a_activation": self.default_a_activation}
        extensions |= {name: value for name, value in kwargs.items() if name in _EXTENSIONS}
        super()._construct(**arguments, **extensions)
        self.mimo_rank = self.config.rank

    def forward(  # type: ignore[override]
        self, u: Tensor, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, inference_params: Any = None
    ) -> Tensor:
        """Map (b, t, d) to (b, t, d); same arguments as `Mamba2`."""
        return self._run_sequence(u, inference_params, seq_idx, cu_seqlens)

    def step(  # type: ignore[override]
        self, u: Tensor, angle_state: Tensor, ssm_state: Tensor, k_state: Tensor, v_state: Tensor, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Run one token (b, d) or (b, 1, d); return its output and the four states, which are changed in place."""
        return self._run_step(u, (angle_state, ssm_state, k_state, v_state))

    def allocate_inference_cache(  # type: ignore[override]
        self,
        batch_size: int,
        max_seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        inplace_state: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Return the states of an empty cache: angles, state, last key, last value."""
        states = super().allocate_inference_cache(batch_size, max_seqlen, dtype)
        return states if device is None else tuple(state.to(device) for state in states)
