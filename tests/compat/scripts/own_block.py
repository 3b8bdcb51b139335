"""A project with a block of its own, made of the package's functions, and a cache of its own."""

import torch
import torch.nn as nn
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.triton.layernorm_gated import RMSNorm as RMSNormGated
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mamba_ssm.utils.generation import InferenceParams

try:
    from mamba_ssm.distributed.tensor_parallel import ColumnParallelLinear
except ImportError:
    ColumnParallelLinear = None


class TinySSD(nn.Module):
    def __init__(self, d=16, heads=4, n=8):
        super().__init__()
        self.heads = heads
        self.n = n
        self.p = d // heads
        self.in_proj = nn.Linear(d, 2 * d + 2 * n + heads)
        self.conv = nn.Parameter(torch.randn(d + 2 * n, 4) * 0.3)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.norm = RMSNormGated(d, eps=1e-5, norm_before_gate=False)
        self.d = d

    def forward(self, u, inference_params=None):
        z, xbc, dt = self.in_proj(u).split([self.d, self.d + 2 * self.n, self.heads], dim=-1)
        A = -torch.exp(self.A_log)
        states = None if inference_params is None else inference_params.key_value_memory_dict
        if states and inference_params.seqlen_offset > 0:
            conv_state, state = states[0]
            xbc = causal_conv1d_update(xbc.squeeze(1), conv_state, self.conv, activation="silu")
            x, B, C = xbc.split([self.d, self.n, self.n], dim=-1)
            expand = lambda v: v.unsqueeze(-1).expand(*v.shape, self.p)  # noqa: E731
            y = (
                selective_state_update(
                    state,
                    x.unflatten(-1, (self.heads, self.p)),
                    expand(dt.squeeze(1)),
                    A[:, None, None].expand(-1, self.p, self.n),
                    B.unsqueeze(1),
                    C.unsqueeze(1),
                    expand(self.D),
                    dt_bias=expand(self.dt_bias),
                    dt_softplus=True,
                )
                .flatten(1)
                .unsqueeze(1)
            )
            return self.norm(y, z)
        xbc, last = causal_conv1d_fn(xbc.transpose(1, 2), self.conv, return_final_states=True, activation="silu")
        x, B, C = xbc.transpose(1, 2).split([self.d, self.n, self.n], dim=-1)
        y, state = mamba_chunk_scan_combined(
            x.unflatten(-1, (self.heads, self.p)),
            dt,
            A,
            B.unsqueeze(2),
            C.unsqueeze(2),
            chunk_size=32,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            return_final_states=True,
        )
        if inference_params is not None:
            inference_params.key_value_memory_dict[0] = (last.clone(), state)
        return self.norm(y.flatten(2), z)


block, u = TinySSD(), torch.randn(2, 12, 16)
whole = block(u)
whole.sum().backward()
assert block.dt_bias.grad is not None
assert ColumnParallelLinear is None
params = InferenceParams(max_seqlen=12, max_batch_size=2)
with torch.no_grad():
    parts = [block(u[:, :7], params)]
    for t in range(7, 12):
        params.seqlen_offset = t
        parts.append(block(u[:, t : t + 1], params))
assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
print("done")
