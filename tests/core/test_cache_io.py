"""A state file is whole and of the right kind, or rejected in one line that names it."""

import hashlib
import json
import struct
from typing import ClassVar, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from anymamba import GenerationState, LMCache, Mamba2Cache, Mamba3
from anymamba.core.cache_io import SavableTree
from tests.models.cases import small_lm

KINDS = ["Mamba2Cache", "LMCache", "GenerationState"]


def save_small_state(kind, path):
    """Save a small state of a kind; return how to load it, and what was saved."""
    model = small_lm(n_layer=1, ssm_cfg={"layer": "Mamba2", "d_state": 2, "headdim": 16}, d_model=16, vocab_size=8)
    state = model.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), 2, seed=0, return_state=True).state
    if kind == "Mamba2Cache":
        state.cache.layers[0].save(path)
        return Mamba2Cache.load, state.cache.layers[0]
    tree = state if kind == "GenerationState" else state.cache
    tree.save(path, model)
    return lambda path: type(tree).load(path, model), tree


def write_forged(path, tensors, **metadata):
    """Write a file of the present version with a checksum that is right, whatever else is wrong."""
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, {**metadata, "checksum": "0" * 32})
    content = path.read_bytes()
    assert content.count(b'"checksum":"' + b"0" * 32) == 1
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    path.write_bytes(content.replace(b'"checksum":"' + b"0" * 32, b'"checksum":"' + digest.encode()))


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.fixture(params=KINDS)
def state(request, tmp_path):
    """Return the path of a state file, how to load it, what it holds, and its metadata without the checksum."""
    path = tmp_path / "some.state"
    load, tree = save_small_state(request.param, path)
    metadata = metadata_of(path)
    assert metadata.pop("checksum")
    return path, load, tree, metadata


def assert_rejected(load, path, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_was_saved_is_loaded_to_the_bit(state):
    path, load, tree, _ = state
    loaded = load(path)
    assert type(loaded) is type(tree)
    for (name, x), y in zip(tree.tensors().items(), loaded.leaves(), strict=True):
        assert torch.equal(x, y), name
        assert x.dtype == y.dtype
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_state_gives_the_same_bytes(kind, tmp_path):
    contents = set()
    for i in range(8):
        torch.manual_seed(0)
        save_small_state(kind, tmp_path / str(i))
        contents.add((tmp_path / str(i)).read_bytes())
    assert len(contents) == 1


def test_a_file_is_as_it_is_described(state):
    path, load, tree, metadata = state
    assert metadata["version"] == "1"
    assert metadata["kind"] == type(tree).__name__
    assert set(metadata) - {"fingerprint"} == {"kind", "version"}
    write_forged(path, tree.tensors(), **metadata)
    assert torch.equal(load(path).leaves()[0], tree.leaves()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_rejected(kind, tmp_path):
    path = tmp_path / "some.state"
    load, _ = save_small_state(kind, path)
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset in range(0, len(content), 1 if kind == "Mamba2Cache" else 7):
            for flip in (1, 0x2A, 0x80):  # the second turns a space of the header into a newline
                file.seek(offset)
                file.write(bytes([content[offset] ^ flip]))
                with pytest.raises(ValueError, match=r"some\.state: "):
                    load(path)
            file.seek(offset)
            file.write(content[offset : offset + 1])
    load(path)


def test_a_file_that_is_cut_or_grows_is_rejected(state):
    path, load, _, _ = state
    content = path.read_bytes()
    for changed in (b"", content[:7], content[: len(content) // 2], content[:-1], content + b"\0", b"\xff" * 100):
        path.write_bytes(changed)
        assert_rejected(load, path, "not a readable safetensors file")
    path.unlink()
    assert_rejected(load, path, "no such file")
    path.mkdir()
    assert_rejected(load, path, "no such file")


def test_other_versions_and_kinds_are_rejected(state):
    path, load, tree, metadata = state
    tensors = tree.tensors()
    write_forged(path, tensors, **{**metadata, "version": "2"})
    assert_rejected(load, path, "expected a state file of version 1, got '2': .*another version of anymamba")
    write_forged(path, tensors, **{**metadata, "kind": "Mamba1Cache"})
    assert_rejected(load, path, "expected a saved .*, got 'Mamba1Cache'")
    write_forged(path, tensors, **{**metadata, "more": "x"})
    assert_rejected(load, path, "expected metadata .*, got .*'more'")
    write_forged(path, tensors, **{name: x for name, x in metadata.items() if name != "version"})
    assert_rejected(load, path, "got 'none'")
    save_file({"x": torch.zeros(1)}, path)
    assert_rejected(load, path, "got a file that names no kind")


def odd_tensors(tree):
    """Return tensors that are not those of this tree, and words of the message."""
    first, *_, last = tree.tensors()
    x = tree.tensors()[first]
    yield {first: None}, f"the state lacks {first}"
    yield {"more": torch.zeros(2)}, "holds unexpected tensors: 'more'"
    yield {first: torch.tensor(1.0)}, f"{last if first == last else ''}.* must be .*"
    yield {first: x[:1]}, "must be .* of shape"
    yield {first: x[:0]}, "must be .* of shape"
    yield {first: x.double()}, "must be .*torch.float"
    yield {first: x.to(torch.int64)}, "must be .*torch.float"
    yield {first: x > 0}, "must be .*torch.float"
    yield {first: x.to(torch.int32)}, f"{first} must be one of F64, .*got I32"
    yield {first: x.to(torch.complex64)}, f"{first} must be one of F64, .*got C64"
    yield {first: x.to(torch.float8_e4m3fn)}, f"{first} must be one of F64, .*got F8_E4M3"
    yield {first: torch.full_like(x, float("nan"))}, f"{first} holds {x.numel()} values that are not finite"
    yield {first: torch.full_like(x, -float("inf"))}, "not finite"


def test_odd_tensors_are_rejected_although_the_checksum_is_right(state):
    path, load, tree, metadata = state
    for changes, message in odd_tensors(tree):
        tensors = {name: x for name, x in {**tree.tensors(), **changes}.items() if x is not None}
        write_forged(path, tensors, **metadata)
        assert_rejected(load, path, message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "logits",
            torch.tensor(1.0),
            r"logits must be torch.float32 of shape \(2, 8\), got torch.float32 of shape \(\)",
        ),
        ("logits", torch.zeros(2, 7), r"got torch.float32 of shape \(2, 7\)"),
        ("logits", torch.zeros(2, 16), r"got torch.float32 of shape \(2, 16\)"),
        ("logits", torch.zeros(2, 8, dtype=torch.float64), "got torch.float64"),
        ("logits", torch.zeros(2, 8, dtype=torch.int64), "got torch.int64"),
        ("logits", torch.zeros(2, 8, dtype=torch.bool), "got torch.bool"),
        ("logits", torch.full((2, 8), float("nan")), "logits has rows whose largest value is not finite"),
        ("logits", torch.full((2, 8), float("inf")), "logits has rows whose largest value is not finite"),
        ("logits", torch.full((2, 8), float("-inf")), "logits has rows whose largest value is not finite"),
        ("seen", torch.zeros(2, 8), "seen must be torch.bool"),
        ("seen", torch.zeros(2, 7, dtype=torch.bool), r"seen must be torch.bool of shape \(2, 8\)"),
        ("keys", torch.zeros(2), "keys must be torch.int64"),
        ("keys", torch.zeros(3, dtype=torch.int64), r"keys must be torch.int64 of shape \(2\)"),
        ("counts", torch.tensor([3, -1]), "counts must be 0 or more, got -1"),
        ("counts", torch.zeros(2, 1, dtype=torch.int64), "counts must be torch.int64"),
    ],
)
def test_a_generation_has_logits_seen_tokens_keys_and_counts_of_its_model(name, value, message, tmp_path):
    path = tmp_path / "some.state"
    load, tree = save_small_state("GenerationState", path)
    metadata = {key: x for key, x in metadata_of(path).items() if key != "checksum"}
    write_forged(path, {**tree.tensors(), name: value}, **metadata)
    assert_rejected(load, path, message)


def test_a_logit_of_minus_infinity_is_a_token_that_is_never_drawn(tmp_path):
    path = tmp_path / "some.state"
    load, tree = save_small_state("GenerationState", path)
    metadata = {key: x for key, x in metadata_of(path).items() if key != "checksum"}
    tree.logits[:, 3] = -float("inf")
    write_forged(path, tree.tensors(), **metadata)
    assert torch.equal(load(path).logits, tree.logits)


def test_a_bool_that_is_neither_true_nor_false_is_rejected(tmp_path):
    path = tmp_path / "some.state"
    load, tree = save_small_state("GenerationState", path)
    metadata = {key: x for key, x in metadata_of(path).items() if key != "checksum"}
    write_forged(path, {**tree.tensors(), "seen": tree.seen.view(torch.uint8) + 1}, **metadata)
    content = path.read_bytes()
    forged_again = content.replace(b'"dtype":"U8"', b'"dtype":"BOOL"')
    header = struct.pack("<Q", struct.unpack("<Q", content[:8])[0] + 2)
    path.write_bytes(header + forged_again[8:])
    resign(path)
    assert_rejected(load, path, "seen must hold True and False, bytes 0 and 1, got 2")


def test_a_shape_that_cannot_be_is_rejected(tmp_path):
    path = tmp_path / "some.state"
    load, tree = save_small_state("Mamba2Cache", path)
    metadata = {key: x for key, x in metadata_of(path).items() if key != "checksum"}
    write_forged(path, tree.rows([]).tensors(), **metadata)
    content = path.read_bytes()
    shape = str(list(tree.rows([]).conv.shape)).replace(" ", "").encode()
    other = b"[18446744073709551615,0]"
    header = struct.pack("<Q", struct.unpack("<Q", content[:8])[0] + len(other) - len(shape))
    path.write_bytes(header + content[8:].replace(shape, other))
    resign(path)
    assert_rejected(load, path, r"conv: invalid shape \[18446744073709551615, 0\] \(dimensions must be below")


def resign(path):
    content = path.read_bytes()
    offset = content.index(b'"checksum":"') + 12
    content = content[:offset] + b"0" * 32 + content[offset + 32 :]
    digest = hashlib.blake2b(content, digest_size=16).hexdigest().encode()
    path.write_bytes(content[:offset] + digest + content[offset + 32 :])


def test_a_header_that_is_nested_too_deeply_is_rejected(state):
    path, load, *_ = state
    header = b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert_rejected(load, path, "not a readable safetensors file")


def test_a_state_that_is_not_finite_is_not_written(state):
    path, _, tree, _ = state
    before = path.read_bytes()
    tree.leaves()[0].flatten()[0] = float("nan")
    with pytest.raises(ValueError, match=r"some.state: not written, because .* holds 1 values that are not finite"):
        tree.save(path, *([] if isinstance(tree, Mamba2Cache) else [small_lm()]))
    assert path.read_bytes() == before


def test_states_of_no_rows_and_of_half_precision_are_kept(tmp_path):
    block = Mamba3(16, d_state=8, headdim=8, dtype=torch.bfloat16)
    cache = block.init_cache(2)
    for tree in (cache, cache.rows([])):
        tree.save(tmp_path / "state")
        loaded = type(tree).load(tmp_path / "state")
        assert [(x.dtype, x.shape) for x in loaded] == [(x.dtype, x.shape) for x in tree]


class _OnlyStatesFields(NamedTuple):
    mean: torch.Tensor


class OnlyStates(_OnlyStatesFields, SavableTree):
    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset({"mean"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_of_states_alone_is_kept(tmp_path, dtype):
    OnlyStates(torch.ones(2, 3, dtype=dtype)).save(tmp_path / "state")
    assert torch.equal(OnlyStates.load(tmp_path / "state").mean, torch.ones(2, 3, dtype=dtype))
    OnlyStates(torch.ones(2, 3, dtype=torch.bfloat16)).save(tmp_path / "state")
    assert_rejected(OnlyStates.load, tmp_path / "state", "mean must be torch.float32")


def test_a_loaded_state_has_memory_of_its_own(state):
    path, load, tree, _ = state
    loaded = load(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    for x, y in zip(tree.leaves(), loaded.leaves(), strict=True):
        assert torch.equal(x, y)
        y.zero_()


def test_the_tensors_of_a_file_have_the_names_of_the_tree(tmp_path):
    path = tmp_path / "state"
    _, tree = save_small_state("GenerationState", path)
    assert list(tree.tensors()) == ["cache.layers.0.conv", "cache.layers.0.ssm", "logits", "seen", "keys", "counts"]
    assert load_file(path).keys() == tree.tensors().keys()
    assert json.loads(path.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")["__metadata__"]["kind"] == "GenerationState"
    assert issubclass(GenerationState, tuple)
    assert issubclass(LMCache, tuple)
