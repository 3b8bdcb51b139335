"""ProtMamba's example model: a Mamba-1 language model of proteins in the official format, pickled on a GPU.

Its repository states no figure of this model that can be computed without the training set, so the reference is
another implementation: transformers' `MambaForCausalLM` with the same weights, in float64 except for its scan, which
computes in float32. Both read proteins of the repository's example alignment, each after the token that begins one.
"""

import ast
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

from anymamba import MambaLM
from tests.published.clone import Clone
from tests.published.row import Figure, Options, Row, near
from tests.support import MODEL_FLOOR

COMMIT = "4dfb7e199542a88babbc4f6b724b09dad8eeacbb"
MODEL = "data/example_pretrained_model"
ALIGNMENT = "data/example_msa.a3m"
VOCABULARY = "ProtMamba_ssm/utils.py"
NUM_PROTEINS = 16


def read_vocabulary(clone: Clone) -> dict[str, int]:
    """Return the ids of tokens: a table in the repository's source, which is parsed and not run."""
    try:
        tree = ast.parse(clone.read_text(VOCABULARY))
        tables = {
            statement.targets[0].id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }
        ids = ast.literal_eval(tables["AA_TO_ID"])
    except (SyntaxError, ValueError, KeyError) as error:
        raise ValueError(f"{VOCABULARY}: expected a table AA_TO_ID of tokens and their ids ({error})") from error
    if not isinstance(ids, dict) or "<cls>" not in ids:
        raise ValueError(f"{VOCABULARY}: expected a table with the token <cls>")
    return ids


def read_proteins(clone: Clone, vocabulary: dict[str, int]) -> list[torch.Tensor]:
    """Return the ids of the first proteins of the alignment; lower-case letters and dashes are the alignment's."""
    proteins: list[str] = []
    for line in clone.read_text(ALIGNMENT).splitlines():
        if line.startswith(">"):
            proteins.append("")
        elif not proteins:
            raise ValueError(f"{ALIGNMENT}: expected a line that begins with >, got {line[:20]!r}")
        else:
            proteins[-1] += line.strip().replace("-", "").upper()
    if not proteins:
        raise ValueError(f"{ALIGNMENT}: expected proteins, found none")
    try:
        return [torch.tensor([vocabulary["<cls>"], *(vocabulary[x] for x in p)]) for p in proteins[:NUM_PROTEINS]]
    except KeyError as error:
        raise ValueError(f"{ALIGNMENT}: the vocabulary has no token {error}") from error


def load_ours(clone: Clone, dtype: torch.dtype) -> MambaLM:
    """Return the model, read as any official checkpoint."""
    clone.read_pickle(f"{MODEL}/pytorch_model.bin")
    with TemporaryDirectory() as directory:
        for name in ("config.json", "pytorch_model.bin"):
            (Path(directory) / name).write_bytes(clone.read(f"{MODEL}/{name}"))
        return MambaLM.from_pretrained(directory, dtype=dtype).eval()


def load_reference(clone: Clone) -> torch.nn.Module:
    """Return transformers' model with the same weights."""
    from transformers import MambaConfig, MambaForCausalLM

    raw = clone.read_json(f"{MODEL}/config.json", "d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple")
    multiple = raw["pad_vocab_size_multiple"]
    config = MambaConfig(
        hidden_size=raw["d_model"],
        num_hidden_layers=raw["n_layer"],
        vocab_size=-(-raw["vocab_size"] // multiple) * multiple,
        residual_in_fp32=False,
    )
    model = MambaForCausalLM(config).double().eval()
    renamed = {"backbone.embedding.weight": "backbone.embeddings.weight"}
    state = clone.read_pickle(f"{MODEL}/pytorch_model.bin")
    model.load_state_dict({renamed.get(name, name): tensor.double() for name, tensor in state.items()})
    return model


def compare(clone: Clone, options: Options) -> list[Figure]:
    """Compare logits, perplexity and choices of tokens."""
    dtype = options.dtype or torch.float32
    ours, reference = load_ours(clone, dtype), load_reference(clone)
    proteins = read_proteins(clone, read_vocabulary(clone))
    pairs = [(ours(p[None]).logits[0], reference(p[None]).logits[0]) for p in proteins]
    our_logits, their_logits = (torch.cat(logits).double() for logits in zip(*pairs, strict=True))
    targets = torch.cat([torch.cat([p[1:], torch.tensor([-100])]) for p in proteins])
    perplexities = [F.cross_entropy(x, targets).exp().item() for x in (our_logits, their_logits)]
    equal = int((our_logits.argmax(-1) == their_logits.argmax(-1)).sum())
    count = len(our_logits)
    what = f"transformers, {count:,} positions"
    difference = abs(perplexities[0] - perplexities[1])
    return [
        near("logits", their_logits, our_logits, MODEL_FLOOR, what),
        Figure("most likely tokens", f"{count:,}", f"{equal:,} equal", equal >= 0.999 * count, "at least 99.9 % equal"),
        Figure(
            "perplexity",
            f"{perplexities[1]:.6f}",
            f"{perplexities[0]:.6f}",
            difference <= MODEL_FLOOR * perplexities[1],
            f"at most {MODEL_FLOOR:.1e} apart",
        ),
    ]


ROW = Row(
    name="proteins",
    title="A Mamba-1 language model of proteins: logits against transformers",
    repository="Bitbol-Lab/ProtMamba-ssm",
    commit=COMMIT,
    compare=compare,
)
