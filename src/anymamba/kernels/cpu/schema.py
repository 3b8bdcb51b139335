"""The arguments of the compiled kernels, described once: the build makes the C++ structures from this file.

`python schema.py` prints the header that the sources include. A library is only used if it was built from the same
description. The build runs this file, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from typing import Any, Literal, NamedTuple

_NUMBER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_C_TYPES = {
    "number": "int64_t",
    "real": "double",
    "parameter": "Parameter",
    "index": "const int64_t*",
    "result": "void*",
}

# own: in the dtype of the activations; acc: float, or double for double; any: of any dtype, passed as acc;
# index: int64; codes: of a quantization format; result: written by the kernel, in memory of the dtype in its note
TensorKind = Literal["own", "acc", "any", "index", "codes", "result"]


class Field(NamedTuple):
    """A field of a structure.

    Attributes:
        name: Name of the field.
        kind: One of number, real, parameter, pointer, or the kind of a tensor.
        axes: Axes of a tensor that is read, one letter each; its shape is checked against the letters' sizes. The type
            of a pointer.
        strides: How many leading axes of a tensor pass their strides, in elements. The last axis is dense; a tensor
            without strides is contiguous.
        note: Meaning of the field.
    """

    name: str
    kind: str
    axes: tuple[str, ...] = ()
    strides: int = 0
    note: str = ""


class Structure(NamedTuple):
    """An argument of a kernel, or a part of one."""

    name: str
    note: str
    sizes: dict[str, str]  # the names of the sizes that letters stand for, which come first
    fields: tuple[Field, ...]

    def members(self) -> list[tuple[str, str, str]]:
        """Return name, C type and comment of every member."""
        members = [(name, "int64_t", "") for name in self.sizes.values()]
        for name, kind, axes, strides, note in self.fields:
            c_type = axes[0] if kind == "pointer" else _C_TYPES.get(kind, "const void*")
            shape = f"({', '.join(self.sizes[axis] for axis in axes)})" if axes and kind != "pointer" else ""
            members.append((name, c_type, ", ".join(filter(None, (shape, note)))))
            if strides:
                members.append((f"{name}_strides[{strides}]", "int64_t", ""))
        return members


def numbers(names: str, note: str = "") -> list[Field]:
    """Return fields that are integers."""
    return [Field(name, "number", note=note) for name in names.split()]


def reals(names: str) -> list[Field]:
    """Return fields that are real numbers."""
    return [Field(name, "real") for name in names.split()]


def parameters(names: str) -> list[Field]:
    """Return fields that are parameters of a module, read in place and in the dtype they have; null for none."""
    return [Field(name, "parameter") for name in names.split()]


def pointer(name: str, c_type: str, note: str = "") -> Field:
    """Return a field that is memory other than a tensor."""
    return Field(name, "pointer", (c_type,), note=note)


def tensor(kind: TensorKind, name: str, axes: str, strides: int = 0, note: str = "") -> Field:
    """Return a field that is a tensor to read; null where it is absent."""
    return Field(name, kind, tuple(axes.split()), strides, note)


def results(names: str, note: str = "") -> list[Field]:
    """Return fields that are contiguous tensors which the kernel writes."""
    return [Field(name, "result", note=note) for name in names.split()]


_CALL = [*numbers("dtype", "of the activations (DType)"), *numbers("threads")]
_PACKED = pointer("bounds", "const int64_t*", "packed: sequences + 1 numbers; else null, and sequences = batch")
_LENGTHS = tensor("index", "lengths", "b", note="real steps of each row, null for all")

SCAN = Structure(
    "ScanArgs",
    "The scan. With k_bias it is Mamba-3's: keys and queries are biased and rotated for each head, the scale of v is "
    "that of the trapezoidal rule, and v may be one row for all ranks, each with weights of its own.",
    {
        "b": "batch",
        "t": "time",
        "r": "rank",
        "h": "heads",
        "g": "groups",
        "p": "width",
        "n": "state",
        "z": "sequences",
        "c": "rates",
        "s": "angles",
    },
    (
        *_CALL,
        *numbers("chunk_len"),
        _PACKED,
        tensor("own", "v", "b t r h p", 4),
        tensor("own", "k", "b t r g n", 4),
        tensor("own", "q", "b t r g n", 4),
        tensor("acc", "log_decay", "b t h", 3),
        tensor("acc", "scale", "b t h", 3, "of v; null for one"),
        tensor("any", "skip", "h p", note="y gains skip * v before its scale; null for none"),
        tensor("acc", "initial_state", "z h p n"),
        *results("y", "own"),
        *results("final_state", "acc"),
        tensor("any", "k_bias", "h r n"),
        tensor("any", "q_bias", "h r n"),
        *numbers("rotation", "which channels rotate together, and how (RotationKind)"),
        tensor("acc", "rate", "b t c", note="per unit of dt: angles, or vectors of each head, (heads, count, 3)"),
        tensor("acc", "dt", "b t h"),
        tensor("acc", "initial_rotation", "z h s", note="before the first step: angles, or quaternions, (count, 4)"),
        tensor("acc", "gamma", "b t h", note="weight of a token in its own step"),
        tensor("acc", "kappa", "b t h", note="of the token before it; the scale is gamma + the next kappa"),
        tensor("any", "value_weight", "h r p"),
        _LENGTHS,
        *results("last_k", "own (sequences, rank, heads, state): the key of the last real step"),
        *results("final_rotation", "acc, like initial_rotation: after the last step"),
        # The backward only; its results have the dtypes and shapes of what they are gradients of, but where noted.
        tensor("own", "dy", "b t r h p", 4),
        tensor("acc", "dfinal_state", "z h p n"),
        *results("dv dk dq dlog_decay dscale"),
        *results("dskip", "acc (sequences, heads, width)"),
        *results("dinitial_state"),
        tensor("own", "dlast_k", "z r h n"),
        tensor("acc", "dfinal_rotation", "z h s"),
        *results("dk_bias dq_bias", "acc (sequences, heads, rank, state)"),
        *results("drate ddt dinitial_rotation dgamma"),
        *results("dkappa", "but for the first step of a sequence, which the caller has in the initial state"),
        *results("dvalue_weight", "acc (sequences, heads, rank, width)"),
    ),
)
CONV = Structure(
    "ConvArgs",
    "The causal convolution with SiLU.",
    {"b": "batch", "t": "time", "v": "channels", "w": "width", "z": "sequences"},
    (
        *_CALL,
        _PACKED,
        tensor("index", "lengths", "b", note="real steps of a row, for the new window; null for all"),
        tensor("own", "x", "b t v", 2),
        tensor("own", "window", "z v w", note="newest last"),
        tensor("any", "weight", "v w"),
        tensor("any", "bias", "v"),
        *results("out new_window", "own"),
        tensor("own", "dout", "b t v", 2),
        tensor("own", "dnew_window", "z v w"),
        *results("dx dwindow", "own"),
        *results("dweight dbias", "acc"),
    ),
)
NORM = Structure(
    "NormArgs",
    "The RMS norm over groups of channels.",
    {"m": "rows", "i": "channels"},
    (
        *_CALL,
        *numbers("group_size norm_before_gate"),
        *reals("eps"),
        tensor("own", "x", "m i", 1),
        tensor("own", "z", "m i", 1, "null: no gate, and norm_before_gate is set"),
        tensor("any", "weight", "i"),
        *results("y", "own"),
        tensor("own", "dy", "m i", 1),
        *results("dx dz", "own"),
        *results("dweight", "acc"),
    ),
)
DISCRETIZE = Structure(
    "DiscretizeArgs",
    "Step sizes, and for Mamba-3 decays, weights and rotations; rows are batch and time fused.",
    {"m": "rows", "b": "batch", "h": "heads", "s": "pairs"},
    (
        *_CALL,
        *numbers("time heavy_tail"),
        *numbers("quaternion", "three numbers of a rotation at a time are a vector"),
        *reals("rate_floor dt_min dt_max range"),
        _LENGTHS,
        tensor("own", "dt_raw", "m h", 1),
        tensor("own", "a_raw", "m h", 1, "null: only step sizes are computed"),
        tensor("own", "trap_raw", "m h", 1),
        tensor("own", "rotation_raw", "m s", 1),
        tensor("any", "dt_bias", "h"),
        *results("dt log_decay gamma kappa rate", "acc"),
        tensor("acc", "ddt", "m h"),
        tensor("acc", "dlog_decay", "m h"),
        tensor("acc", "dgamma", "m h"),
        tensor("acc", "dkappa", "m h"),
        tensor("acc", "drate", "m s"),
        *results("ddt_raw da_raw dtrap_raw drotation_raw", "own"),
        *results("ddt_bias", "acc"),
    ),
)
GATE = Structure(
    "GateArgs",
    "Mamba-3's gate over ranks.",
    {"m": "rows", "r": "rank", "i": "channels"},
    (
        *_CALL,
        tensor("own", "y", "m r i"),
        tensor("own", "z", "m i", 1),
        tensor("any", "gate_weight", "r i", note="null, like the next, for ones"),
        tensor("any", "out_weight", "r i"),
        *results("out", "own"),
        tensor("own", "dout", "m i", 1),
        *results("dy dz", "own"),
        *results("dweights", "acc (2, rank, channels), of gate_weight and of out_weight; where there are any"),
    ),
)
SELECTIVE = Structure(
    "SelectiveArgs",
    "Mamba-1's scan.",
    {"b": "batch", "t": "time", "i": "channels", "n": "state", "z": "sequences"},
    (
        *_CALL,
        _PACKED,
        tensor("own", "x", "b t i", 2),
        tensor("acc", "dt", "b t i", 2, "before the softplus"),
        tensor("own", "z", "b t i", 2, "null: no gate"),
        tensor("own", "b", "b t n", 2),
        tensor("own", "c", "b t n", 2),
        tensor("acc", "rates", "i n", note="not positive"),
        tensor("any", "skip", "i"),
        tensor("acc", "initial_state", "z i n"),
        *results("y", "own"),
        *results("final_state", "acc"),
        tensor("own", "dy", "b t i", 2),
        tensor("acc", "dfinal_state", "z i n"),
        *results("dx ddt dz db dc drates dskip dinitial_state"),
    ),
)

_QUANTIZED = (
    *_CALL,
    *numbers("format", "of the weight (DType)"),
    tensor("codes", "codes", "o y", note="a row of `y` numbers, or bytes, for each of its rows"),
    tensor("codes", "scales", "o g", note="bfloat16; null where the format has none"),
)
_QUANTIZED_SIZES = {"o": "out", "i": "in", "y": "row_codes", "g": "groups"}
QUANTIZED_MATMUL = Structure(
    "QuantizedMatmulArgs",
    "y = x weightᵀ for a few rows, with a quantized weight.",
    {"m": "rows", **_QUANTIZED_SIZES},
    (*_QUANTIZED, tensor("acc", "x", "m i"), *results("y", "acc")),
)
DEQUANTIZE = Structure(
    "DequantizeArgs",
    "A quantized weight, or some rows of it, as plain numbers.",
    _QUANTIZED_SIZES,
    (*_QUANTIZED, *results("weight", "acc")),
)

# Tokens through a block or a model, one per row, as a list of phases. Between phases everything is float (double for
# double) in slots: columns of a (batch, width) matrix that all phases share. A negative slot is none.
_PHASES = (
    Structure("EdgePhase", "slot = input, or output = slot", {}, (*numbers("width slot"),)),
    Structure(
        "NormPhase",
        "to = weight x / rms(x) over groups of channels, without `weight` x / rms(x); with a gate, as norm.h has it",
        {},
        (*numbers("width group_size norm_before_gate"), *reals("eps"), *numbers("x z to"), *parameters("weight")),
    ),
    Structure("GatePhase", "to = x silu(z)", {}, (*numbers("width x z to"),)),
    Structure(
        "ScalePhase",
        "to = factor x, channel by channel times `weight` if there is one",
        {},
        (*numbers("width x to"), *reals("factor"), *parameters("weight")),
    ),
    Structure(
        "LinearPhase",
        "to = x weightᵀ + bias, or to += it; without `to`, the step's output",
        {},
        (*numbers("in out x to add"), *parameters("weight scale bias")),
    ),
    Structure(
        "ConvPhase",
        "to = silu of the causal convolution of x, whose window in the cache advances by one",
        {},
        (*numbers("channels width x to cache_window"), *parameters("weight bias")),
    ),
    Structure(
        "Mamba1Phase",
        "Mamba-1 after its inner projections, the gate included; dt is before its softplus",
        {},
        (*numbers("channels state x dt z b c to cache_state"), *parameters("a_log skip")),
    ),
    Structure(
        "Mamba2Phase",
        "Mamba-2 between its convolution, whose output x, B, C is `act`, and its norm",
        {},
        (
            *numbers("heads head_width groups state skip_per_channel"),
            *reals("dt_min dt_max"),
            *numbers("dt act to cache_state"),
            *parameters("dt_bias a_log skip"),
        ),
    ),
    Structure(
        "AttentionPhase",
        "attention between its projections: x is query, key and value; `rotated` channels of a head turn by position "
        "times `frequencies` (float64); `window` 0 and `softcap` 0 are none",
        {},
        (
            *numbers("heads groups head_width rotated interleaved window"),
            *reals("scale softcap"),
            *numbers("x to cache_kv cache_lengths"),
            *parameters("frequencies"),
        ),
    ),
    Structure(
        "Mamba3Phase",
        "Mamba-3 between its projections, the gate and the norm included; `numbers` is a slot for step sizes, decays, "
        "weights and rates, `keys` one for the normed B and C",
        {},
        (
            *numbers("heads head_width groups state rank num_rotations rotation heavy_tail"),
            *reals("rate_range dt_min dt_max a_floor key_eps query_eps out_eps"),
            *numbers("z x b c dt a trap rotation_raw numbers keys to cache_state cache_k cache_v cache_rotation"),
            *parameters("key_norm query_norm key_bias query_bias dt_bias skip mimo_x mimo_z mimo_o out_norm"),
        ),
    ),
)
_PARTS = (
    Structure("Parameter", "null data: there is none", {}, (pointer("data", "const void*"), *numbers("dtype"))),
    Structure(
        "Phase", "a kind, and the structure of that kind", {}, (*numbers("kind"), pointer("args", "const void*"))
    ),
)
STEP = Structure(
    "StepArgs",
    "A compiled decode step, and a window of tokens of each sequence, one after the other: `batch` rows in all.",
    {},
    (
        *numbers("dtype threads batch window width count"),
        pointer("phases", "const Phase*"),
        pointer("input", "const void*"),
        *numbers("input_dtype input_row"),
        *results("output"),
        *numbers("output_width"),
        pointer("old_cache", "const void* const*", "tensor by tensor"),
        pointer("new_cache", "void* const*", "the same memory or other memory; null: the old one stays as it is"),
        pointer("capacities", "const int64_t*", "steps of a row in the memory of each tensor that grows"),
        pointer("slots", "void*", "(batch, width), in the dtype of states, of the caller; null: memory of the call"),
        pointer("replayed", "const int64_t*", "how many tokens of each sequence to run again from `slots`; null: all"),
    ),
)
_KERNELS = {"scan": SCAN, "conv": CONV, "norm": NORM, "discretize": DISCRETIZE, "gate": GATE, "selective": SELECTIVE}
FUNCTIONS = {f"{name}_{way}": args for name, args in _KERNELS.items() for way in ("forward", "backward")}
FUNCTIONS |= {"quantized_matmul": QUANTIZED_MATMUL, "dequantize": DEQUANTIZE, "decode_step": STEP}
STRUCTURES = {s.name: s for s in (*_PARTS, *_PHASES, *FUNCTIONS.values())}
# The kinds of phases, each with its structure: the switch over kinds in csrc/decode/decode.h is made from it.
PHASE_KINDS = {
    "read": "EdgePhase",
    "write": "EdgePhase",
    "norm": "NormPhase",
    "gate": "GatePhase",
    "scale": "ScalePhase",
    "linear": "LinearPhase",
    "conv": "ConvPhase",
    "mamba1": "Mamba1Phase",
    "mamba2": "Mamba2Phase",
    "mamba3_tokens": "Mamba3Phase",
    "mamba3_heads": "Mamba3Phase",
    "attention": "AttentionPhase",
}
ROTATIONS = ("interleaved", "halves", "quaternion")


@functools.cache
def c_structure(name: str) -> type[ctypes.Structure]:
    """Return the structure of that name for ctypes."""
    fields: list[tuple[str, Any]] = [(size, _NUMBER) for size in STRUCTURES[name].sizes.values()]
    for field, kind, _, strides, _ in STRUCTURES[name].fields:
        types = {"number": _NUMBER, "real": _REAL}
        fields.append((field, c_structure("Parameter") if kind == "parameter" else types.get(kind, _POINTER)))
        if strides:
            fields.append((f"{field}_strides", _NUMBER * strides))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def header() -> str:
    """Return the C++ side."""
    lines = ["// Made from schema.py by the build.", "#pragma once", "", "#include <cstdint>", ""]
    for structure in STRUCTURES.values():
        lines += [f"// {structure.note}", f'extern "C" struct {structure.name} {{']
        lines += [f"  {kind} {name};" + (f"  // {note}" if note else "") for name, kind, note in structure.members()]
        lines += ["};", ""]
    lines += ["enum PhaseKind : int64_t {", *(f"  {_constant(kind)}," for kind in PHASE_KINDS), "};", ""]
    phases = " ".join(f"X({_constant(kind)}, {structure})" for kind, structure in PHASE_KINDS.items())
    lines += ["// X(kind, structure) for every kind of phase.", f"#define ANYMAMBA_PHASES(X) {phases}", ""]
    lines += ["enum RotationKind : int64_t {", *(f"  {_constant(kind)}," for kind in ROTATIONS), "};", ""]
    entries = " ".join(f"X({function}, {structure.name})" for function, structure in FUNCTIONS.items())
    lines += ["// X(function, structure) for every kernel.", f"#define ANYMAMBA_KERNELS(X) {entries}", ""]
    return "\n".join(lines)


def _constant(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def digest() -> str:
    """Return a name for the description: a library that was built from another one is rejected."""
    return hashlib.sha256(header().encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(header() + f'#define ANYMAMBA_ARGUMENTS "{digest()}"')
