"""Mamba-3: config and cache, and the block around its recurrence."""

from anymamba.blocks.mamba3.block import Mamba3 as Mamba3
from anymamba.blocks.mamba3.config import Mamba3Cache as Mamba3Cache
from anymamba.blocks.mamba3.config import Mamba3Config as Mamba3Config
