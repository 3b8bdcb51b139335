"""Stacks of blocks, and the models built from them: language models, classifiers, regressors, masked language models.

In reading order: `stack/` (residual layers and the loop over them), `config.py` and `families.py` (from a table of
fields to the config of every block), `backbone.py` (embedding, stack, and the tying of the head), `lm.py` (the language
model), `trainer_methods.py` (what trainers of other libraries call on it), `inputs.py`, `outputs.py` and `loss.py`
(what goes in and comes out of it), `cache.py` (what it carries between calls, with the fingerprint in its file),
`sequence/` (the other models).

A token on its way through `model(ids)`: `lm.py` checks the ids and calls the backbone; `backbone.py` looks up the
embedding and starts the residual stream; `stack.py` runs the passes in the loop of `layer_loop.py`; in each pass a
`ResidualLayer` norms the stream, runs its block (`anymamba.blocks`) from the cache of that pass, and adds the result;
after the last pass come `norm_f` and the head, and `LMOutput` returns the logits with the new cache.
"""

from anymamba.models.cache import LMCache as LMCache
from anymamba.models.cache import StackCache as StackCache
from anymamba.models.config import MambaLMConfig as MambaLMConfig
from anymamba.models.families import FAMILIES as FAMILIES
from anymamba.models.families import register_family as register_family
from anymamba.models.lm import MambaLM as MambaLM
from anymamba.models.loss import IGNORED_LABEL as IGNORED_LABEL
from anymamba.models.outputs import LMOutput as LMOutput
from anymamba.models.sequence.classifier import SequenceClassifier as SequenceClassifier
from anymamba.models.sequence.classifier import SequenceOutput as SequenceOutput
from anymamba.models.sequence.masked_lm import MaskedLM as MaskedLM
from anymamba.models.sequence.masked_lm import MaskedLMOutput as MaskedLMOutput
from anymamba.models.sequence.masked_lm import mask_tokens as mask_tokens
from anymamba.models.sequence.regression import LatentModel as LatentModel
from anymamba.models.sequence.regression import SequenceRegressor as SequenceRegressor
from anymamba.models.sequence.sequence_model import SequenceConfig as SequenceConfig
from anymamba.models.sequence.sequence_model import SequenceModel as SequenceModel
from anymamba.models.stack.bidirectional import BidirectionalStack as BidirectionalStack
from anymamba.models.stack.class_tokens import OutputIndices as OutputIndices
from anymamba.models.stack.residual_layer import ResidualLayer as ResidualLayer
from anymamba.models.stack.residual_layer import make_norm as make_norm
from anymamba.models.stack.stack import Stack as Stack
from anymamba.models.stack.stack_config import BidirectionalConfig as BidirectionalConfig
from anymamba.models.stack.stack_config import StackConfig as StackConfig
