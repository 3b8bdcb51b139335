"""The cases for a GPU: operators and a block, against the official kernels and fla where they are installed.

The other libraries' parts are written after their documentation and have not been run: there is no GPU where this was
written. Without them, and on a CPU, the cases time our kernels and our portable code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba import SsdPath
from anymamba.ops import causal_conv
from anymamba.scan import scan, ssd
from benchmarks.harness import Call, Case, Contender, forward, forward_backward
from benchmarks.mamba2 import LAYER_130M, MODES, TINY, BlockShape, Mode, our_block, portable_block, set_up_block

_PORTABLE = SsdPath.serial_recalculated()
_Inputs = dict[str, Tensor]
_Functions = dict[str, Callable[[_Inputs], Tensor]]


def draw_inputs(shape: BlockShape) -> tuple[_Inputs, _Inputs, _Inputs]:
    """Return the inputs of the SSD, of a scan whose heads have keys of their own, and of a convolution."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    sizes_bt, heads, width = (shape.batch, shape.t), shape.heads, shape.heads * shape.headdim
    x, dt = normal(*sizes_bt, heads, shape.headdim), F.softplus(normal(*sizes_bt, heads) - 4)
    keys = {name: normal(*sizes_bt, 1, shape.d_state) for name in ("B", "C")}
    ssd_inputs = {"x": x, "dt": dt, "A": -normal(heads).exp(), **keys, "D": normal(heads)}
    by_head = {name: normal(*sizes_bt, heads, shape.d_state) / shape.d_state for name in ("k", "q")}
    scan_inputs = {"v": normal(*sizes_bt, heads, shape.headdim), **by_head, "log_decay": -dt}
    conv_inputs = {"x": normal(*sizes_bt, width), "weight": normal(width, 4), "bias": normal(width)}
    return ssd_inputs, scan_inputs, conv_inputs


def run_ssd(path: SsdPath, inputs: _Inputs) -> Tensor:
    """Run our SSD."""
    return ssd(**inputs, path=path)[0]


def run_official_ssd(inputs: _Inputs) -> Tensor:
    """Run that of mamba_ssm."""
    function = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    y: Tensor = function(*(inputs[name] for name in ("x", "dt", "A", "B", "C")), chunk_size=256, D=inputs["D"])
    return y


def run_scan(path: SsdPath, inputs: _Inputs) -> Tensor:
    """Run our scan."""
    v, k, q = (inputs[name].unsqueeze(2) for name in ("v", "k", "q"))
    return scan(v, k, q, inputs["log_decay"], path=path)[0].squeeze(2)


def run_fla_scan(inputs: _Inputs) -> Tensor:
    """Run that of fla."""
    function = import_module("fla.ops.simple_gla").chunk_simple_gla
    y: Tensor = function(inputs["q"], inputs["k"], inputs["v"], g=inputs["log_decay"], scale=1.0)[0]
    return y


def run_conv(inputs: _Inputs) -> Tensor:
    """Run our convolution."""
    x = inputs["x"]
    return causal_conv(x, x.new_zeros(x.shape[0], x.shape[2], 4), inputs["weight"], inputs["bias"])[0]


def run_official_conv(inputs: _Inputs) -> Tensor:
    """Run that of causal_conv1d."""
    function = import_module("causal_conv1d").causal_conv1d_fn
    y: Tensor = function(inputs["x"].transpose(1, 2), inputs["weight"], inputs["bias"], activation="silu")
    return y.transpose(1, 2)


def set_up(run: Callable[[_Inputs], Tensor], which: int, mode: Mode, shape: BlockShape) -> Call:
    """Return a call of a function on the inputs of that number."""
    inputs = draw_inputs(shape)[which]
    if mode == "forward":
        return forward(lambda: {"y": run(inputs)})
    with torch.no_grad():
        head = torch.randn(run(inputs).shape, generator=torch.Generator().manual_seed(1))
    for tensor in inputs.values():
        tensor.requires_grad_()
    return forward_backward(lambda: run(inputs), head, inputs)


def official_block(shape: BlockShape) -> nn.Module:
    """Return the block of mamba_ssm with the weights of ours."""
    family = import_module("mamba_ssm").Mamba2
    block: nn.Module = family(d_model=shape.d_model, d_state=shape.d_state, headdim=shape.headdim)
    block.load_state_dict(our_block(shape).state_dict())
    return block


def operator_case(name: str, which: int, mode: Mode, functions: _Functions) -> Case:
    """Return a case of an operator; contenders that are named after a library need it."""
    contenders = tuple(
        Contender(
            name=contender,
            setup=partial(set_up, run, which, mode, LAYER_130M),
            tiny=partial(set_up, run, which, mode, TINY),
            computes=name,
            library="anymamba" if contender.startswith("anymamba") else contender,
            optional=not contender.startswith("anymamba"),
        )
        for contender, run in functions.items()
    )
    return Case(name=f"gpu/{name}/{mode}", contenders=contenders, baseline="anymamba", tolerance=1e-3)


def block_case(mode: Mode) -> Case:
    """Return a case of a block of Mamba-2."""
    builders = {"anymamba": our_block, "anymamba (portable)": portable_block, "mamba_ssm": official_block}
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_block, build, mode, LAYER_130M),
            tiny=partial(set_up_block, build, mode, TINY),
            computes="block",
            library=name if name == "mamba_ssm" else "anymamba",
            optional=name == "mamba_ssm",
        )
        for name, build in builders.items()
    )
    return Case(name=f"gpu/block/{mode}", contenders=contenders, baseline="anymamba", tolerance=1e-3)


_PATHS = {"anymamba": SsdPath(), "anymamba (portable)": _PORTABLE}
_SSD: _Functions = {**{name: partial(run_ssd, path) for name, path in _PATHS.items()}, "mamba_ssm": run_official_ssd}
_SCAN: _Functions = {**{name: partial(run_scan, path) for name, path in _PATHS.items()}, "fla": run_fla_scan}
_CONV: _Functions = {"anymamba": run_conv, "causal_conv1d": run_official_conv}

CASES: tuple[Case, ...] = tuple(
    case
    for mode in MODES
    for case in (
        operator_case("ssd", 0, mode, _SSD),
        operator_case("scan", 1, mode, _SCAN),
        operator_case("conv", 2, mode, _CONV),
        block_case(mode),
    )
)
