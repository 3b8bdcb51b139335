"""Generation: prompts in, tokens and texts out, one row independent of the others.

Files in reading order:

- state.py: everything that the next token depends on, as a value.
- prefill.py: prompts become states, segment by segment.
- decoder.py: one step of the model, compiled where kernels cover it.
- sampling.py: logits become tokens.
- speculation.py: drafts of the next tokens, which the model reads together with the last one.
- grammar.py, grammar_handler.py: which tokens a JSON schema or another grammar allows next.
- generate.py: the loop around these three, `TokenStream`; `stream` and `generate`.
- tokenizers.py, tokenizer_limits.py: texts become tokens and back.
- completion.py: the tokens of a row become its text, up to an end token, a stop text or a number of tokens.
- pipeline.py: a model and its tokenizer as one, for texts.
- chat.py, template_handler.py: conversations become texts.
- tool_calls.py: the ways in which models write tool calls.
- sandbox.py, sandbox_worker.py: the separate processes in which templates and grammars, other people's programs, run.
- scoring.py, detect_activation.py: how likely a text is, and what follows from it for old Mamba-3 checkpoints.

A token of `Pipeline.stream("Once")`: `FileTokenizer.encode` turns the text into ids, `prefill` reads them, and `stream`
returns a `TokenStream` that starts from their state. `TokenStream.__next__` gives the state's logits to `sample_tokens`
and returns the token. `CompletionBuilder.add` decodes it and returns the text that can no longer change, which the
pipeline yields. Only when the next token is asked for does `Decoder.step` let the model read this one. The server uses
the same parts, with many rows in one step: `Prefill`, `sample_tokens`, `CompletionBuilder`.
"""

from anymamba.generation.chat import ChatTemplate as ChatTemplate
from anymamba.generation.completion import Choice as Choice
from anymamba.generation.completion import Completion as Completion
from anymamba.generation.decoder import Decoder as Decoder
from anymamba.generation.decoder import decoder as decoder
from anymamba.generation.generate import Generation as Generation
from anymamba.generation.generate import TokenStream as TokenStream
from anymamba.generation.generate import generate as generate
from anymamba.generation.generate import stream as stream
from anymamba.generation.grammar import CompiledGrammar as CompiledGrammar
from anymamba.generation.grammar import Grammar as Grammar
from anymamba.generation.grammar import GrammarError as GrammarError
from anymamba.generation.grammar import compile_grammar as compile_grammar
from anymamba.generation.pipeline import Pipeline as Pipeline
from anymamba.generation.pipeline import pipeline as pipeline
from anymamba.generation.prefill import prefill as prefill
from anymamba.generation.sampling import Sampling as Sampling
from anymamba.generation.scoring import TextScore as TextScore
from anymamba.generation.scoring import score_text as score_text
from anymamba.generation.speculation import Drafter as Drafter
from anymamba.generation.speculation import Speculation as Speculation
from anymamba.generation.state import GenerationState as GenerationState
from anymamba.generation.tokenizers import ByteTokenizer as ByteTokenizer
from anymamba.generation.tokenizers import FileTokenizer as FileTokenizer
from anymamba.generation.tokenizers import IncrementalDetokenizer as IncrementalDetokenizer
from anymamba.generation.tokenizers import Tokenizer as Tokenizer
from anymamba.generation.tokenizers import load_tokenizer as load_tokenizer
from anymamba.renamed import renamed_attributes as _renamed_attributes

__getattr__ = _renamed_attributes(__name__, {"TextStream": "IncrementalDetokenizer", "start": "prefill"})
