"""The scan behind every SSD model with its algorithms, and Mamba-1's own."""

from anymamba.scan.path import SsdPath as SsdPath
from anymamba.scan.recurrent import scan_step as scan_step
from anymamba.scan.scan import scan as scan
from anymamba.scan.selective import selective_scan as selective_scan
from anymamba.scan.selective import selective_step as selective_step
from anymamba.scan.ssd import ssd as ssd
