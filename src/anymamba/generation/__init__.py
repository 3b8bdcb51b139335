"""Generation: sampling, the loop, states, and text from tokens."""

from anymamba.generation.chat import ChatTemplate as ChatTemplate
from anymamba.generation.completion import Completion as Completion
from anymamba.generation.decoder import Decoder as Decoder
from anymamba.generation.decoder import decoder as decoder
from anymamba.generation.generate import Generation as Generation
from anymamba.generation.generate import TokenStream as TokenStream
from anymamba.generation.generate import generate as generate
from anymamba.generation.generate import stream as stream
from anymamba.generation.pipeline import Pipeline as Pipeline
from anymamba.generation.pipeline import pipeline as pipeline
from anymamba.generation.prefill import prefill as prefill
from anymamba.generation.sampling import Sampling as Sampling
from anymamba.generation.state import GenerationState as GenerationState
from anymamba.generation.tokenizers import ByteTokenizer as ByteTokenizer
from anymamba.generation.tokenizers import FileTokenizer as FileTokenizer
from anymamba.generation.tokenizers import IncrementalDecoder as IncrementalDecoder
from anymamba.generation.tokenizers import Tokenizer as Tokenizer
from anymamba.generation.tokenizers import load_tokenizer as load_tokenizer
from anymamba.renamed import renamed_attributes as _renamed_attributes

__getattr__ = _renamed_attributes(__name__, {"TextStream": "IncrementalDecoder"})
