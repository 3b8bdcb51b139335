"""Blocks: one family per file, each with a config, a cache and a module around its scan.

They are a package of their own because a block has one contract whatever its family: from any cache, `prefill`,
repeated `step` and any split of the sequence give the same result. Reading order:

1. `block_inputs.py`, `base.py`: checks of inputs, and `Block`, whose entry points make them.
2. `block_config.py`: how configs are given and checked.
3. `layers.py`: convolution and norms as modules with the official names.
4. `mamba2.py`, `mamba1.py`: two families, from projection to projection.
5. `mamba3_config.py`, `mamba3.py`: the third.
6. `attention.py`: attention, whose cache grows.

A token: `Mamba2.step` runs the compiled step if one covers the block. Otherwise it checks the token and the cache and
calls `mix` on a sequence of length one: projection, convolution, `ssd` from the cached state, gated norm, projection.
`prefill` makes the same call with a longer sequence.
"""

from anymamba.blocks.attention import Attention as Attention
from anymamba.blocks.attention import AttentionCache as AttentionCache
from anymamba.blocks.attention import AttentionConfig as AttentionConfig
from anymamba.blocks.base import Block as Block
from anymamba.blocks.block_config import BlockConfig as BlockConfig
from anymamba.blocks.block_config import check_sizes as check_sizes
from anymamba.blocks.block_config import ignored_options as ignored_options
from anymamba.blocks.block_config import make_config as make_config
from anymamba.blocks.block_inputs import prefill_with_states_at as prefill_with_states_at
from anymamba.blocks.layers import CausalConv as CausalConv
from anymamba.blocks.layers import GatedRMSNorm as GatedRMSNorm
from anymamba.blocks.layers import ProjectionPart as ProjectionPart
from anymamba.blocks.layers import RMSNorm as RMSNorm
from anymamba.blocks.mamba1 import Mamba1 as Mamba1
from anymamba.blocks.mamba1 import Mamba1Cache as Mamba1Cache
from anymamba.blocks.mamba1 import Mamba1Config as Mamba1Config
from anymamba.blocks.mamba2 import Mamba2 as Mamba2
from anymamba.blocks.mamba2 import Mamba2Cache as Mamba2Cache
from anymamba.blocks.mamba2 import Mamba2Config as Mamba2Config
from anymamba.blocks.mamba3 import Mamba3 as Mamba3
from anymamba.blocks.mamba3 import Mamba3Cache as Mamba3Cache
from anymamba.blocks.mamba3 import Mamba3Config as Mamba3Config
from anymamba.core.cache_io import SavableTree as SavableTree
