"""A stand-in for the official packages `mamba_ssm` and `causal_conv1d`: code that imports them runs on anymamba.

In reading order: `install.py` (the table of official names, and the importer that serves it), `cuda_as_cpu.py` (an
option for code with hard-coded devices), `mixers.py` (blocks), `mha.py` (attention), `vim.py` (Mamba-1 in both
directions), `residual_block.py` and `norms.py` (what surrounds a block), `mixer_seq_simple.py` (the language model),
`generation.py` (sampling), and the functions, each in the file of its official module: `selective_scan_interface.py`,
`ssd_combined.py`, `ssd_minimal.py`, `selective_state_update.py` and `causal_conv1d.py`, on `seq_idx.py` (packed rows),
and for Mamba-3 `mamba3_scans.py` and `mamba3_step.py`.

A script that says `from mamba_ssm import Mamba2`: the importer finds `mamba_ssm` in its table and creates a module with
the names listed there; `Mamba2(d_model=256)` fills the fields of our `Mamba2Config` from the official arguments; a call
goes to `prefill` of our block, and the states in `inference_params` are converted to our cache and written back.
"""

from anymamba.compat.install import install as install
from anymamba.compat.install import uninstall as uninstall
