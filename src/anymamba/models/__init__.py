"""Language models: config, stack, cache, and the checkpoint formats they are read from and written to."""

from anymamba.models.cache import LMCache as LMCache
from anymamba.models.config import MambaLMConfig as MambaLMConfig
from anymamba.models.lm import LMOutput as LMOutput
from anymamba.models.lm import MambaLM as MambaLM
