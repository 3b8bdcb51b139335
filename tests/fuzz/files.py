"""Part 1: files of every kind that the library reads, damaged or forged.

Opening a file gives what it gave before, or a ValueError or OSError of one line: no other exception, crash or hang, and
no code runs. Where a checksum covers a file, any change is rejected, unless the checksum was repaired too.
"""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from anymamba import GenerationState, LMCache, MambaLM
from anymamba.checkpoints.open import describe_non_finite_tensors, open_checkpoint
from anymamba.core.io import digest_file
from anymamba.generation.tokenizers import FileTokenizer
from anymamba.training.api import resume
from anymamba.training.config.run_config import read_config
from anymamba.training.data.shards import open_corpus
from anymamba.training.data.sources import find_documents
from tests.fuzz.child import Finding
from tests.fuzz.mutations import apply, draw, sign_state
from tests.models.cases import GOLDEN, codestral_lm
from tests.training.cases import silent

FIXTURES = Path(__file__).parents[1] / "fixtures"
OFFICIAL = ("mamba1", "mamba2", "mamba3_mimo", "mamba3_quaternion")
QUANTIZED = ("int8", "int4")
SECONDS = 30.0  # limit of a case, on a busy machine
KINDS = {".json": "json", ".safetensors": "safetensors", ".state": "safetensors", ".bin": "pickle", ".jsonl": "bytes"}


def open_model(directory):
    open_checkpoint(directory)
    for mapped in (False, True):
        model = MambaLM.from_pretrained(directory, mapped=mapped)
        with torch.no_grad():
            model(torch.arange(5).unsqueeze(0) % model.config.vocab_size)
    describe_non_finite_tensors(open_checkpoint(directory))


def open_tokenizer(directory):
    tokenizer = FileTokenizer(directory / "tokenizer.json")
    ids = tokenizer.encode("héllo wörld 日本語")
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, tokenizer.vocab_size - 1])


@torch.no_grad()
def open_states(directory):
    """Return every tensor of the saved states of a model."""
    model = MambaLM.from_pretrained(directory)
    cache = LMCache.load(directory / "cache.state", model)
    state = GenerationState.load(directory / "generation.state", model)
    block = type(cache.layers[1]).load(directory / "block.state")
    trees = {"cache": cache, "generation": state, "block": block}
    tensors = {f"{kind}.{name}": x for kind, tree in trees.items() for name, x in tree.tensors().items()}
    model.step(torch.zeros(cache.batch_size, dtype=torch.int64), cache)
    model.generate(None, 2, cache=state, seed=1)
    return digest(tensors)


def open_run(directory):
    """Resume a run, finish it, and return its weights."""
    trainer = resume(directory, report=silent)
    return digest(dict(trainer.model.named_parameters()))


def open_data(directory):
    corpus = open_corpus(directory)
    read = {name: getattr(corpus, name).read(0, getattr(corpus, name).total) for name in ("train", "held_out")}
    return digest({**read, "lengths": corpus.train.lengths})


def open_texts(directory):
    """Read the config of a run, and lines of JSON."""
    read_config(directory / "run.toml")
    for document in find_documents((str(directory / "lines.jsonl"),), "text").documents:
        document.read(b"")


def digest(tensors):
    """Return a digest of a dict of tensors, which differs when a bit does."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, x in sorted(tensors.items()):
        hashed.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        hashed.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else str(x.item()).encode())
    return hashed.hexdigest()


# Kinds of files, the function that opens them, and the files that a checksum covers.
TARGETS = {
    **{
        f"model {name}": (open_model, ())
        for name in (*OFFICIAL, "transformers", "codestral", "zip", "pickle", "shards", *QUANTIZED)
    },
    "tokenizer": (open_tokenizer, ()),
    **{f"states {name}": (open_states, (".state",)) for name in OFFICIAL},
    "former states": (open_states, ()),
    "run": (open_run, (".safetensors", "training.json", "index.json")),
    "data": (open_data, (".safetensors",)),
    "texts": (open_texts, ()),
}


def prepare(directory):
    """Make one file of every kind."""
    for name in OFFICIAL:
        _copy(FIXTURES / name, directory / f"model {name}", "config.json", "model.safetensors")
        target = _copy(FIXTURES / name, directory / f"states {name}", "config.json", "model.safetensors")
        _save_states(FIXTURES / name, target)
    shutil.copytree(FIXTURES / "mamba3_double", directory / "former states")
    _copy(GOLDEN / "lm_hf_mamba2", directory / "model transformers", "config.json", "model.safetensors")
    codestral_lm(torch.bfloat16).save_pretrained(directory / "model codestral", format="codestral")
    for name in QUANTIZED:
        MambaLM.from_pretrained(FIXTURES / "mamba2", weights=name).save_pretrained(directory / f"model {name}")
    tensors = load_file(FIXTURES / "mamba2" / "model.safetensors")
    for name in ("zip", "pickle"):
        target = _copy(FIXTURES / "mamba2", directory / f"model {name}", "config.json")
        torch.save(tensors, target / "pytorch_model.bin", _use_new_zipfile_serialization=name == "zip")
    _save_shards(tensors, _copy(FIXTURES / "mamba2", directory / "model shards", "config.json"))
    shutil.copytree(FIXTURES / "run", directory / "run")
    shutil.copytree(FIXTURES / "run" / "data", directory / "data")
    _save_tokenizer(directory / "tokenizer")
    (directory / "texts").mkdir()
    shutil.copy(Path(__file__).parents[2] / "examples" / "demo.toml", directory / "texts" / "run.toml")
    lines = [json.dumps({"text": text, "number": i}) for i, text in enumerate(["one", "zwei", "三", ""])]
    (directory / "texts" / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")


def _copy(source, target, *names):
    target.mkdir(parents=True)
    for name in names:
        shutil.copy(source / name, target / name)
    return target


def _save_states(source, target):
    model = MambaLM.from_pretrained(source)
    cache = LMCache.load(source / "cache.state", model)
    cache.save(target / "cache.state", model)
    GenerationState.load(source / "generation.state", model).save(target / "generation.state", model)
    type(cache.layers[1]).load(source / "block.state").save(target / "block.state")


def _save_shards(tensors, target):
    table = {}
    for part in range(2):
        shard = {name: x for i, (name, x) in enumerate(tensors.items()) if i % 2 == part}
        save_file(shard, target / f"model-0000{part + 1}-of-00002.safetensors")
        table.update(dict.fromkeys(shard, f"model-0000{part + 1}-of-00002.safetensors"))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _save_tokenizer(directory):
    import tokenizers

    directory.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["one two three two one"] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))


def make(rng, prepared):
    """Draw a case: a kind of file, and one to three mutations; the last may repair the checksum."""
    target = rng.choice(list(TARGETS))
    files = sorted(path for path in (prepared / target).rglob("*") if path.is_file())
    mutations = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        file = rng.choice(files)
        kind = KINDS.get(file.suffix, "bytes")
        mutation = draw(rng, file.read_bytes(), kind)
        mutations.append({"file": file.relative_to(prepared / target).as_posix(), **mutation})
    return {"target": target, "mutations": mutations, "signed": rng.random() < 0.5}


def simpler(case):
    """Yield simpler cases: one mutation less, or without a repaired checksum."""
    for i in range(len(case["mutations"])):
        if len(case["mutations"]) > 1:
            yield {**case, "mutations": case["mutations"][:i] + case["mutations"][i + 1 :]}
    if case["signed"]:
        yield {**case, "signed": False}


def run(case, prepared, directory):
    """Run a case: open the damaged files.

    Returns:
        "opened" or "rejected".

    Raises:
        Finding: It was opened in spite of a wrong checksum, or rejected in more than one line.
    """
    target, (opened, covered) = case["target"], TARGETS[case["target"]]
    copied, marker = directory / "copied", directory / "code ran"
    shutil.copytree(prepared / target, copied)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for mutation in case["mutations"]:
        file = copied / mutation["file"]
        file.write_bytes(apply(mutation, file.read_bytes(), str(marker)))
    if case["signed"]:
        _sign(copied, target)
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contents = opened(copied)
    except FloatingPointError:  # forged weights may overflow, and training says so
        return "rejected"
    except (ValueError, OSError) as error:
        if "\n" in str(error).strip() or not str(error).strip():
            raise Finding(f"rejected in other than a line: {type(error).__name__}: {str(error)[:300]!r}") from error
        return "rejected"
    finally:
        if marker.exists():
            raise Finding("ran code that a file held")
    promised = [name for name in changed if name.endswith(covered)] if covered else []
    if promised and not case["signed"] and contents != opened(copy_undamaged(prepared / target, directory)):
        raise Finding(f"opened with other values, though a checksum covers {', '.join(promised)}")
    return "opened"


def copy_undamaged(source, directory):
    """Return the undamaged files, which are opened too."""
    return shutil.copytree(source, directory / "whole", dirs_exist_ok=True)


def _sign(copied, target):
    """Repair every checksum, as an attacker would."""
    for file in copied.glob("*.state"):
        file.write_bytes(sign_state(file.read_bytes()))
    for index in copied.rglob("index.json"):
        _sign_json(index, lambda table, file=index: _sign_shards(table, file.parent))
    for manifest in copied.rglob("training.json"):
        _sign_json(manifest, lambda table, file=manifest: _sign_manifest(table, file.parent, copied))


def _sign_json(file, change):
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        change(table)
        file.write_text(json.dumps(table), encoding="utf-8")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        return


def _sign_shards(table, directory):
    for shard in (*table["train"], *table["held_out"]):
        shard["blake2b"] = digest_file(directory / shard["file"])


def _sign_manifest(table, directory, run):
    from anymamba.training.checkpoint.manifest import manifest_checksum

    table.pop("checksum", None)
    table["files"] = {name: digest_file(directory / name) for name in table["files"]}
    table["data"] = open_corpus(run / "data").checksum
    table["checksum"] = manifest_checksum(table)
