"""The scan by the compiled kernels: the algorithm of `serial_recalculated`, fused and vectorised, for CPUs.

It is registered as an operator, so that `torch.compile` and `torch.export` see one node, for any sequence length.
"""

from __future__ import annotations

from anymamba.kernels.cpu.scan import scan_backward, scan_forward
from anymamba.scan.operator import scan_operator

scan_fused = scan_operator("scan_fused", scan_forward, scan_backward)
