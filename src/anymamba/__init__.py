"""Mamba-1, Mamba-2 and Mamba-3 for PyTorch, on any machine."""

from anymamba.scan import SsdPath as SsdPath
from anymamba.scan import ssd as ssd
from anymamba.version import __version__ as __version__
