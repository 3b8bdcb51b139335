"""The recurrences: the scan of every SSD model with its algorithms, what is built on it, and Mamba-1's own.

They are a package of their own because every model is parameters around one of two functions, `scan` and
`selective_scan`, and all algorithms of a function agree on values and gradients. Reading order:

1. `path.py`: `SsdPath`, which names the algorithm, its chunk length and Mamba-3's pathway.
2. `scan.py`: the contract and the operator.
3. `recurrent.py`: the definition, which every algorithm is compared with.
4. `chunking.py`: how time is cut into chunks, and how decays between steps are computed exactly.
5. `minimal.py`, `serial.py`: masks and matmuls, and the five stages K1–K5, differentiated by autograd.
6. `serial_recalculated.py`: one chunk at a time, with a backward derived by hand; `segments.py`: the same for devices
   other than a CPU, many chunks at once.
7. `ssd.py`, `mamba3_scan.py`: Mamba-2's and Mamba-3's forms of the scan.
8. `selective_scan.py`: Mamba-1's recurrence.

A sequence of Mamba-2: `ssd` checks it and calls its operator, which runs a compiled kernel if one covers the inputs,
and else multiplies x by dt and calls the operator of `scan`; that chooses `serial_recalculated`, which cuts time into
chunks and carries the state from each to the next.
"""

from anymamba import kernels as _kernels  # noqa: F401  registers the kernels of devices
from anymamba.scan.mamba3_scan import rotated_trapezoid_scan as rotated_trapezoid_scan
from anymamba.scan.mamba3_scan import trapezoid_scan as trapezoid_scan
from anymamba.scan.path import SsdPath as SsdPath
from anymamba.scan.recurrent import scan_step as scan_step
from anymamba.scan.scan import scan as scan
from anymamba.scan.selective_scan import selective_scan as selective_scan
from anymamba.scan.selective_scan import selective_step as selective_step
from anymamba.scan.ssd import ssd as ssd
