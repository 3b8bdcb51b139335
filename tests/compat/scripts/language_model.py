"""As in benchmarks of mamba_ssm: a model is made, trained a little, saved, loaded, and generates."""

import sys
from pathlib import Path

import torch
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

device, dtype = "cpu", torch.float32
config = MambaConfig(d_model=32, n_layer=2, vocab_size=16, ssm_cfg={"layer": "Mamba2", "headdim": 16, "d_state": 16})
model = MambaLMHeadModel(config, device=device, dtype=dtype)
text = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6] * 6])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(60):
    logits = model(text).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.save_pretrained(Path(sys.argv[1]) / "model")

model = MambaLMHeadModel.from_pretrained(str(Path(sys.argv[1]) / "model"), device=device, dtype=dtype)
model.eval()
prompt = text[:, :9]
out = model.generate(
    input_ids=prompt,
    max_length=24,
    cg=True,
    return_dict_in_generate=True,
    output_scores=True,
    enable_timing=False,
    temperature=1.0,
    top_k=1,
)
assert out.sequences.tolist() == text[:, :24].tolist(), out.sequences
assert len(out.scores) == 15
print("done")
