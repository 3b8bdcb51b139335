"""Generation: sampling, the loop, states, and text from tokens."""

from anymamba.generation.generate import Generation as Generation
from anymamba.generation.generate import TokenStream as TokenStream
from anymamba.generation.generate import generate as generate
from anymamba.generation.generate import stream as stream
from anymamba.generation.prefill import start as start
from anymamba.generation.sampling import Sampling as Sampling
from anymamba.generation.state import GenerationState as GenerationState
