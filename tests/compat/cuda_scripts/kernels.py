"""A test of kernels as their authors write it: tensors made on the GPU, assertions that they are, timings by events."""

import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn
from mamba_ssm import Mamba3
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

device = "cuda"
generator = torch.Generator(device=device).manual_seed(1)
u = torch.randn(2, 8, 16, device=device, generator=generator, requires_grad=True)
delta = torch.rand(2, 8, 16, device=device)
A = -torch.rand(8, 4, device="cuda", dtype=torch.float32)
B = torch.randn(2, 4, 16, device=torch.device("cuda"))
C = torch.randn_like(B)
weight = torch.randn(8, 4).to(0)
bias = torch.zeros(8).cuda(0)
for tensor in (u, delta, A, B, C, weight, bias):
    assert tensor.is_cuda
    assert tensor.get_device() == 0
torch.cuda.synchronize()
with torch.cuda.device(u.device):
    x = causal_conv1d_fn(u, weight, bias, activation="silu")
    y = selective_scan_fn(x, delta, A, B, C, torch.ones(8, device=u.device), delta_softplus=True)
y.sum().backward()
assert u.grad.is_cuda
state = u.new_zeros(2, 8, 4, device="cuda")
for t in range(16):
    step = F.softplus(delta[..., t]).unsqueeze(-1)
    state = torch.exp(step * A) * state + step * B[:, None, :, t] * x[..., t].unsqueeze(-1)
    assert torch.allclose((state * C[:, None, :, t]).sum(-1) + x[..., t], y[..., t], atol=1e-4)

with torch.device("cuda"):
    block = Mamba3(32, d_state=16, headdim=16)
assert all(parameter.is_cuda for parameter in block.parameters())
torch.set_default_device("cuda")
compiled = torch.compile(lambda x: x.to("cuda") + torch.ones(32, device="cuda"), backend="eager")
assert compiled(block(torch.randn(2, 5, 32))).is_cuda
torch.set_default_device(None)


@torch.jit.script
def with_zeros(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros([3], device=x.device)


assert with_zeros(torch.cuda.FloatTensor([1.0, 2.0, 3.0])).type() == "torch.FloatTensor"
assert torch.arange(3).type("torch.cuda.LongTensor").is_cuda
assert torch.ones(3).pin_memory().to("cuda:0").dtype == torch.float32
states = torch.cuda.get_rng_state_all()
first = torch.randn(3, device="cuda")
torch.cuda.set_rng_state_all(states)
assert torch.equal(first, torch.randn(3, device="cuda"))
print("done")
