import numpy as np
import pytest
import torch

from anymamba import LMCache, Mamba2, Mamba2Cache
from tests.blocks.families import FEW, make_block


@pytest.fixture
def cache():
    block = Mamba2(d_model=16, d_state=8, headdim=8)
    return block.prefill(torch.randn(3, 5, 16))[1]


@pytest.mark.parametrize("name", FEW)
def test_a_cache_holds_its_own_memory_and_no_more(name):
    """A view of what a sequence computed would keep all of it alive; what grows is stored in blocks of 64 steps."""
    block = make_block(name, torch.float32)
    with torch.no_grad():
        _, cache = block.prefill(torch.randn(2, 50, block.config.d_model))
        _, stepped = block.step(torch.randn(2, block.config.d_model), cache)
    for tensors in (cache, stepped, cache.detach()):
        blocks = [
            64 / x.shape[1] if name in tensors.GROWING_FIELDS else 1
            for name, x in zip(tensors._fields, tensors, strict=True)
        ]
        assert [x.untyped_storage().nbytes() for x in tensors] == [
            int(x.nbytes * r) for x, r in zip(tensors, blocks, strict=True)
        ]


def test_clone_shares_no_memory(cache):
    clone = cache.clone()
    assert isinstance(clone, Mamba2Cache)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(cache, clone, strict=True))


def test_detach_drops_the_history(cache):
    assert cache.ssm.requires_grad
    assert not cache.detach().ssm.requires_grad


def test_to_keeps_the_state_wide(cache):
    half = cache.to(dtype=torch.bfloat16)
    assert (half.conv.dtype, half.ssm.dtype) == (torch.bfloat16, torch.float32)
    double = cache.to(dtype=torch.float64)
    assert (double.conv.dtype, double.ssm.dtype) == (torch.float64, torch.float64)
    assert cache.to(torch.bfloat16).conv.dtype == torch.bfloat16
    assert cache.to("meta").ssm.device.type == "meta"


@pytest.mark.parametrize("index", [[0, 2], [1, 1, 1], slice(1, 3), 2, torch.tensor([2, 0])], ids=str)
def test_rows_selects_and_repeats(cache, index):
    rows = cache.rows(index)
    expected = cache.ssm[[index] if isinstance(index, int) else index]
    assert torch.equal(rows.ssm, expected)
    assert rows.batch_size == expected.shape[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("index", [np.int64(1), torch.tensor(1), -2], ids=str)
def test_one_row_is_a_batch_of_one(cache, index):
    assert torch.equal(cache.rows(index).ssm, cache.ssm[1:2])


@pytest.mark.usefixtures("unchecked")
def test_rows_that_are_none_are_rejected(cache):
    assert torch.equal(cache.rows((0, 2)).ssm, cache.ssm[[0, 2]])
    for index in (3, [0, -4], torch.tensor([7])):
        with pytest.raises(IndexError, match="there are 3 rows, 0 to 2"):
            cache.rows(index)
    for index in (1.0, "1", [True], torch.tensor([[0]])):
        with pytest.raises(TypeError, match="expected a row's number"):
            cache.rows(index)


@pytest.mark.parametrize("name", FEW)
def test_cat_puts_rows_one_after_another(name):
    block = make_block(name, torch.float32)
    _, cache = block.prefill(torch.randn(3, 4, block.config.d_model))
    joined = type(cache).cat([cache.rows([2]), cache.rows([0, 1])])
    for row, expected in zip(joined, cache.rows([2, 0, 1]), strict=True):
        assert torch.equal(row, expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", FEW)
def test_the_cache_of_a_model_is_not_that_of_a_block(name):
    """Though one of one layer holds the same tensors."""
    block = make_block(name, torch.float32)
    whole, x = LMCache((block.init_cache(2),)), torch.randn(2, 3, 16)
    with torch.no_grad():
        for call in (lambda: block.prefill(x, whole), lambda: block.step(x[:, 0], whole)):
            with pytest.raises(TypeError, match=r"cache must be a (Mamba\d|Attention)Cache, got LMCache"):
                call()


def test_save_and_load_give_the_same_bits(cache, tmp_path):
    file = tmp_path / "state.safetensors"
    cache.save(file)
    loaded = Mamba2Cache.load(file)
    assert isinstance(loaded, Mamba2Cache)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(cache, loaded, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_damaged_or_foreign_file_is_rejected(cache, tmp_path):
    file = tmp_path / "state.safetensors"
    cache.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        Mamba2Cache.load(file)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="expected a saved Mamba2Cache, got a file that names no kind"):
        Mamba2Cache.load(file)


def test_a_failed_save_leaves_the_old_file(cache, tmp_path, monkeypatch):
    file = tmp_path / "state.safetensors"
    cache.save(file)
    before = file.read_bytes()

    def full_disk(path, tensors, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anymamba.core.cache_io.save_tensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        cache.save(file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
