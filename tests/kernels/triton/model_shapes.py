"""Inputs of the operators at the shapes of released models, on the meta device, for the compile check."""

import torch

CASES = {}  # by name: a function of the dtype that returns the operator and its inputs


def case(name):
    """Enter a case into the table."""

    def enter(function):
        CASES[name] = function
        return function

    return enter


def empty(dtype, *shape):
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(*shape):
    """Return a tensor of decays or states."""
    return empty(torch.float32, *shape)


def scan_inputs(dtype, r, h, p, g, n, b=2, t=2048):
    """Return the inputs of `scan`."""
    keys = [empty(dtype, b, t, r, g, n) for _ in range(2)]
    return empty(dtype, b, t, r, h, p), *keys, wide(b, t, h), wide(b, h, p, n), None, None, "fastest"


@case("scan of mamba2-130m")
def scan_130m(dtype):
    """Return the plain scan, one group."""
    return "scan", scan_inputs(dtype, 1, 24, 64, 1, 128)


@case("scan of rank 4, packed")
def scan_mimo(dtype):
    """Return a packed scan with MIMO ranks, each head with its own keys."""
    inputs = list(scan_inputs(dtype, 4, 24, 64, 24, 128, b=1))
    inputs[4], inputs[5] = wide(5, 24, 64, 128), torch.empty(6, dtype=torch.int32, device="meta")
    return "scan", tuple(inputs)


def ssd_inputs(h, n, dtype, b=2, t=2048):
    """Return the inputs of `ssd` with one group, a skip per head, and heads of 64."""
    keys = [empty(dtype, b, t, 1, n) for _ in range(2)]
    decays = wide(b, t, h), wide(b, t, h)
    return empty(dtype, b, t, h, 64), *decays, *keys, wide(h), wide(b, h, 64, n), None, None, "fastest"


@case("ssd of mamba2-130m")
def ssd_130m(dtype):
    """Return Mamba-2's scan of 24 heads."""
    return "ssd", ssd_inputs(24, 128, dtype)


@case("ssd of mamba2-1.3b")
def ssd_1_3b(dtype):
    """Return Mamba-2's scan of 64 heads."""
    return "ssd", ssd_inputs(64, 128, dtype)


@case("selective scan of mamba-130m")
def selective_130m(dtype, b=2, t=2048, i=1536, n=16):
    """Return Mamba-1's scan of 1536 channels."""
    x, z = empty(dtype, b, t, i), empty(dtype, b, t, i)
    keys = [empty(dtype, b, t, n) for _ in range(2)]
    state = wide(b, i, n)
    return "selective_scan", (x, wide(b, t, i), wide(i, n), *keys, wide(i), z, state, None, None, "fastest")


def rotated_inputs(dtype, r, rotation, b=2, t=2048, h=24, p=64, n=128):
    """Return the inputs of Mamba-3's scan; half of the state rotates."""
    keys = [empty(dtype, b, t, r, 1, n) for _ in range(2)]
    biases = [wide(h, r, n) for _ in range(2)]
    steps = [wide(b, t, n // 4), *(wide(b, t, h) for _ in range(4))]
    weight = None if r == 1 else wide(h, r, p)
    states = wide(b, h, p, n), wide(b, h, n // 4)
    options = rotation, None, None, None, "fastest", "single"
    return empty(dtype, b, t, h, p), *keys, *biases, *steps, wide(h), weight, *states, *options


@case("mamba3-187m, SISO")
def rotated_siso(dtype):
    """Return the scan of Mamba-3 with one rank."""
    return "rotated_trapezoid_scan", rotated_inputs(dtype, 1, "interleaved")


@case("mamba3-187m, MIMO of rank 4")
def rotated_mimo(dtype):
    """Return the scan of Mamba-3 with four ranks."""
    return "rotated_trapezoid_scan", rotated_inputs(dtype, 4, "halves")


@case("convolution of mamba2-130m")
def convolution(dtype):
    """Return a batch from windows."""
    shapes = ((2, 2048, 1792), (2, 1792, 4), (1792, 4))
    return "causal_conv", (*(empty(dtype, *shape) for shape in shapes), None, None, None)


@case("convolution of mamba-130m, packed")
def packed_convolution(dtype):
    """Return packed sequences, with a bias."""
    shapes = ((1, 4096, 1536), (5, 1536, 4), (1536, 4), (1536,))
    bounds = torch.empty(6, dtype=torch.int32, device="meta")
    return "causal_conv", (*(empty(dtype, *shape) for shape in shapes), None, bounds)


@case("norm of mamba2-130m")
def norm_130m(dtype):
    """Return a gated norm, gate first."""
    return "rms_norm", (empty(dtype, 2, 2048, 1536), empty(dtype, 2, 2048, 1536), empty(dtype, 1536), 1536, False, 1e-5)


@case("norm of mamba2-1.3b")
def norm_1_3b(dtype):
    """Return a gated norm of wide rows."""
    return "rms_norm", (empty(dtype, 2, 2048, 4096), empty(dtype, 2, 2048, 4096), empty(dtype, 4096), 4096, False, 1e-5)


@case("norm of the keys of mamba3-187m")
def norm_of_keys(dtype):
    """Return a norm without a gate, of narrow rows."""
    return "rms_norm", (empty(dtype, 2, 2048, 4, 1, 128), None, wide(128), 128, True, 1e-5)


@case("gate of mamba3-187m, SISO")
def gate_siso(dtype):
    """Return the gate of one rank."""
    return "rank_gate", (empty(dtype, 2, 2048, 1, 24, 64), empty(dtype, 2, 2048, 24, 64), None, None)


@case("gate of mamba3-187m, MIMO 4")
def gate_mimo(dtype):
    """Return the gate of four ranks."""
    weights = [empty(dtype, 24, 4, 64) for _ in range(2)]
    return "rank_gate", (empty(dtype, 2, 2048, 4, 24, 64), empty(dtype, 2, 2048, 24, 64), *weights)


@case("step sizes of mamba2-130m")
def step_sizes(dtype):
    """Return raw step sizes."""
    return "step_sizes", (empty(dtype, 2, 2048, 24), empty(dtype, 24), 0.0, float("inf"), None)


@case("discretization of mamba3-187m")
def discretization(dtype):
    """Return raw numbers of a block that rotates in planes."""
    raw = [empty(dtype, 2, 2048, width) for width in (24, 24, 24, 32)]
    return "discretize", (*raw, wide(24), True, 1e-4, 0.0, float("inf"), 1.0, False, None)


@case("discretization with quaternions")
def discretization_quaternion(dtype):
    """Return raw numbers of a padded batch whose rotations are vectors."""
    raw = [empty(dtype, 2, 2048, width) for width in (24, 24, 24, 24 * 16 * 3)]
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    return "discretize", (*raw, wide(24), False, 1e-4, 1e-3, 0.1, 1.0, True, lengths)
