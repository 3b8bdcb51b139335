"""A training loop with mixed precision, as many repositories have it: CUDA everywhere, and no other device."""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
from mamba_ssm import Mamba, Mamba2
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available(), "a GPU is required"
torch.backends.cudnn.benchmark = True
torch.cuda.manual_seed_all(0)
torch.cuda.set_device(0)
device = torch.device("cuda:0" if torch.cuda.device_count() > 0 else "cpu")
print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory >> 30, "GB")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.mixers = nn.ModuleList([Mamba(16, d_state=4), Mamba2(16, headdim=8, d_state=8)])
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        assert x.is_cuda
        h = self.embed(x)
        for mixer in self.mixers:
            h = h + mixer(h)
        return self.head(h + torch.zeros(1, device="cuda")).mean(1)


data = TensorDataset(torch.randn(24, 9, 4), torch.randint(0, 2, (24,)))
loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)
model = nn.DataParallel(Model()).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scaler = GradScaler()
criterion = nn.CrossEntropyLoss().cuda()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
losses = []
for _epoch in range(6):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            logits = model(x)
            assert logits.dtype == torch.float16
            loss = criterion(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
assert losses[-1] < losses[0], losses
print(f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB")
torch.cuda.empty_cache()

path = Path(sys.argv[1]) / "model.pt" if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "model.pt"
torch.save(model.module.state_dict(), path)
again = Model().to("cuda")
again.load_state_dict(torch.load(path, map_location="cuda:0"))
again.eval()
x = next(iter(loader))[0].cuda()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
    begin = time.time()
    assert torch.is_autocast_enabled()
    assert torch.equal(again(x), model.module.eval()(x))
    torch.cuda.current_stream().synchronize()
print("done")
