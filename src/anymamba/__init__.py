"""Mamba-1, Mamba-2 and Mamba-3 for PyTorch, on any machine."""

from anymamba.blocks.mamba2 import Mamba2 as Mamba2
from anymamba.blocks.mamba2 import Mamba2Cache as Mamba2Cache
from anymamba.blocks.mamba2 import Mamba2Config as Mamba2Config
from anymamba.blocks.mamba3 import Mamba3 as Mamba3
from anymamba.blocks.mamba3 import Mamba3Cache as Mamba3Cache
from anymamba.blocks.mamba3 import Mamba3Config as Mamba3Config
from anymamba.scan import SsdPath as SsdPath
from anymamba.scan import ssd as ssd
from anymamba.version import __version__ as __version__
