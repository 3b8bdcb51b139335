"""The scan behind every SSD model, and its algorithms."""

from anymamba.scan.path import SsdPath as SsdPath
from anymamba.scan.recurrent import scan_step as scan_step
from anymamba.scan.scan import scan as scan
from anymamba.scan.ssd import ssd as ssd
