"""The recurrences: the scan of every SSD model with its algorithms, what is built on it, and Mamba-1's own."""

from anymamba import kernels as _kernels  # noqa: F401  registers what devices bring
from anymamba.scan.path import SsdPath as SsdPath
from anymamba.scan.recurrent import scan_step as scan_step
from anymamba.scan.rotated_scan import rotated_trapezoid_scan as rotated_trapezoid_scan
from anymamba.scan.scan import scan as scan
from anymamba.scan.selective_scan import selective_scan as selective_scan
from anymamba.scan.selective_scan import selective_step as selective_step
from anymamba.scan.ssd import ssd as ssd
from anymamba.scan.trapezoidal_scan import trapezoid_scan as trapezoid_scan
