"""Mamba-1, Mamba-2 and Mamba-3 for PyTorch, on any machine."""

import sys
from itertools import dropwhile
from pathlib import PurePath
from typing import TYPE_CHECKING

from anymamba.renamed import install_finders as _install_finders
from anymamba.version import __version__ as __version__

_install_finders()

# The `anymamba` command imports what it needs, when it needs it: its help must not wait for torch, and it sets how
# threads wait before torch is imported. torchrun starts it with an option: `python -u -m anymamba`.
_ARGUMENTS = list(dropwhile(lambda x: x.startswith("-") and x not in ("-c", "-m"), sys.orig_argv[1:]))
_IS_COMMAND = PurePath(*_ARGUMENTS[:1]).stem == "anymamba" or _ARGUMENTS[:2] == ["-m", "anymamba"]

if TYPE_CHECKING or not _IS_COMMAND:
    from anymamba import analysis as inspect  # noqa: F401
    from anymamba.blocks.attention import Attention as Attention
    from anymamba.blocks.attention import AttentionCache as AttentionCache
    from anymamba.blocks.attention import AttentionConfig as AttentionConfig
    from anymamba.blocks.mamba1 import Mamba1 as Mamba1
    from anymamba.blocks.mamba1 import Mamba1Cache as Mamba1Cache
    from anymamba.blocks.mamba1 import Mamba1Config as Mamba1Config
    from anymamba.blocks.mamba2 import Mamba2 as Mamba2
    from anymamba.blocks.mamba2 import Mamba2Cache as Mamba2Cache
    from anymamba.blocks.mamba2 import Mamba2Config as Mamba2Config
    from anymamba.blocks.mamba3 import Mamba3 as Mamba3
    from anymamba.blocks.mamba3 import Mamba3Cache as Mamba3Cache
    from anymamba.blocks.mamba3 import Mamba3Config as Mamba3Config
    from anymamba.core.anomaly import check_finite as check_finite
    from anymamba.core.process import keep_freed_memory as keep_freed_memory
    from anymamba.core.registry import kernels_off as kernels_off
    from anymamba.core.registry import portable as portable
    from anymamba.core.threads import configure_threads as configure_threads
    from anymamba.generation import GenerationState as GenerationState
    from anymamba.generation import stream as stream
    from anymamba.generation.decoder import decoder as decoder
    from anymamba.generation.generate import generate as generate
    from anymamba.generation.pipeline import pipeline as pipeline
    from anymamba.models import BidirectionalConfig as BidirectionalConfig
    from anymamba.models import BidirectionalStack as BidirectionalStack
    from anymamba.models import LatentModel as LatentModel
    from anymamba.models import LMCache as LMCache
    from anymamba.models import MambaLM as MambaLM
    from anymamba.models import MambaLMConfig as MambaLMConfig
    from anymamba.models import MaskedLM as MaskedLM
    from anymamba.models import SequenceClassifier as SequenceClassifier
    from anymamba.models import SequenceConfig as SequenceConfig
    from anymamba.models import SequenceModel as SequenceModel
    from anymamba.models import SequenceRegressor as SequenceRegressor
    from anymamba.models import Stack as Stack
    from anymamba.models import StackCache as StackCache
    from anymamba.models import StackConfig as StackConfig
    from anymamba.models import mask_tokens as mask_tokens
    from anymamba.models import register_family as register_family
    from anymamba.scan import SsdPath as SsdPath
    from anymamba.scan import rotated_trapezoid_scan as rotated_trapezoid_scan
    from anymamba.scan import trapezoid_scan as trapezoid_scan
    from anymamba.scan.selective_scan import selective_scan as selective_scan
    from anymamba.scan.ssd import ssd as ssd
