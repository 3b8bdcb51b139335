"""Stacks and language models: configs, caches, and the checkpoint formats they are read from and written to."""

from anymamba.models.bidirectional import BidirectionalConfig as BidirectionalConfig
from anymamba.models.bidirectional import BidirectionalStack as BidirectionalStack
from anymamba.models.cache import LMCache as LMCache
from anymamba.models.cache import StackCache as StackCache
from anymamba.models.classifier import SequenceClassifier as SequenceClassifier
from anymamba.models.classifier import SequenceRegressor as SequenceRegressor
from anymamba.models.config import MambaLMConfig as MambaLMConfig
from anymamba.models.latent import LatentModel as LatentModel
from anymamba.models.lm import MambaLM as MambaLM
from anymamba.models.masked_lm import MaskedLM as MaskedLM
from anymamba.models.masked_lm import mask_tokens as mask_tokens
from anymamba.models.output import LMOutput as LMOutput
from anymamba.models.sequence import SequenceModel as SequenceModel
from anymamba.models.sequence_config import SequenceConfig as SequenceConfig
from anymamba.models.stack import Stack as Stack
from anymamba.models.stack_config import StackConfig as StackConfig
