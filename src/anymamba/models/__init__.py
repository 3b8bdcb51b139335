"""Stacks and language models: configs, caches, and the checkpoint formats they are read from and written to."""

from anymamba.models.cache import LMCache as LMCache
from anymamba.models.cache import StackCache as StackCache
from anymamba.models.config import MambaLMConfig as MambaLMConfig
from anymamba.models.lm import MambaLM as MambaLM
from anymamba.models.outputs import LMOutput as LMOutput
from anymamba.models.sequence.classifier import SequenceClassifier as SequenceClassifier
from anymamba.models.sequence.masked_lm import MaskedLM as MaskedLM
from anymamba.models.sequence.masked_lm import mask_tokens as mask_tokens
from anymamba.models.sequence.regression import LatentModel as LatentModel
from anymamba.models.sequence.regression import SequenceRegressor as SequenceRegressor
from anymamba.models.sequence.sequence_model import SequenceConfig as SequenceConfig
from anymamba.models.sequence.sequence_model import SequenceModel as SequenceModel
from anymamba.models.stack.bidirectional import BidirectionalConfig as BidirectionalConfig
from anymamba.models.stack.bidirectional import BidirectionalStack as BidirectionalStack
from anymamba.models.stack.stack import Stack as Stack
from anymamba.models.stack.stack_config import StackConfig as StackConfig
