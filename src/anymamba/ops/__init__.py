"""The parts of a block around its scan: convolution, norms, gates, discretization and rotation.

They are a package of their own because each is one operator with a contract, which blocks, the kernels, the stand-in
for the official packages and other people's models call by one name. Reading order:

1. `conv.py`: the causal depthwise convolution, and the window that carries it from call to call.
2. `norms_and_gates.py`: RMS norms, gated or not, and Mamba-3's gate over MIMO ranks.
3. `discretization.py`: step sizes, decays, trapezoidal weights and angular rates from raw projections.
4. `rotation.py`: running rotations, and keys and queries rotated by them.
5. `causal_attention.py`: attention over the steps of a cache, and rotary positions.

A token of Mamba-2: `causal_conv` mixes its x, B and C with the last three inputs in the window; `step_sizes` turns its
raw dt into a step size; the scan (`anymamba.scan`) updates the state; `rms_norm` normalizes the output times
`silu(z)`.
"""

from anymamba import kernels as _kernels  # noqa: F401  registers the kernels of devices
from anymamba.ops.conv import causal_conv as causal_conv
from anymamba.ops.discretization import discretize as discretize
from anymamba.ops.discretization import step_sizes as step_sizes
from anymamba.ops.norms_and_gates import rank_gate as rank_gate
from anymamba.ops.norms_and_gates import rms_norm as rms_norm
