import copy
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from time import perf_counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from anymamba import MambaLM
from anymamba.checkpoints.open import describe_non_finite_tensors, open_checkpoint
from anymamba.checkpoints.weight_files import count_non_finite, open_weight_file
from anymamba.core.io import TensorFileReader, read_json
from tests.models.cases import FAMILIES, GOLDEN, LM_GOLDENS, codestral_lm, golden, small_lm
from tests.support import MODEL_FLOOR, assert_near

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def same(a, b):
    """Return whether two tensors are equal to the bit, dtypes included."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def edit_json(path, **changes):
    path.write_text(json.dumps({**read_json(path), **changes}))


@pytest.fixture
def directory(tmp_path):
    """Make a writable copy of an official checkpoint."""
    return shutil.copytree(GOLDEN / "lm_mamba2", tmp_path / "model")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["official", "transformers", "codestral"])
def test_a_round_trip_is_exact_to_the_bit(format, dtype, tmp_path):
    one_group = {"layer": "Mamba2", "headdim": 8}
    model = codestral_lm(dtype) if format == "codestral" else small_lm(dtype=dtype, ssm_cfg=one_group)
    model.save_pretrained(tmp_path / "a", format=format)
    loaded = MambaLM.from_pretrained(tmp_path / "a")
    assert same(loaded, model)
    assert loaded.dtype == dtype
    loaded.save_pretrained(tmp_path / "b", format=format)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family_survives_the_official_format(family, dtype, tmp_path):
    model = small_lm(family, dtype, d_intermediate=10)
    model.save_pretrained(tmp_path)
    assert same(MambaLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", LM_GOLDENS)
def test_what_was_read_is_written_back(name, tmp_path):
    checkpoint = open_checkpoint(GOLDEN / name)
    MambaLM.from_pretrained(GOLDEN / name).save_pretrained(tmp_path, format=checkpoint.format.name)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    before, after = read_json(GOLDEN / name / "config.json"), read_json(tmp_path / "config.json")
    before.pop("time_step_limit", None), after.pop("time_step_limit", None)  # two spellings of infinity
    assert before == after


def test_formats_convert_into_each_other(tmp_path):
    model, g = MambaLM.from_pretrained(GOLDEN / "lm_hf_mamba2"), golden("lm_hf_mamba2")
    model.save_pretrained(tmp_path / "official", format="official")
    official = MambaLM.from_pretrained(tmp_path / "official")
    assert same(official, model)
    assert not {"architectures", "transformers"} & set(read_json(tmp_path / "official" / "config.json"))
    official.save_pretrained(tmp_path / "transformers", format="transformers")
    assert torch.equal(
        MambaLM.from_pretrained(tmp_path / "transformers")(g["input_ids"]).logits, model(g["input_ids"]).logits
    )


def test_codestral_files_have_the_prefix_and_params(tmp_path):
    model = codestral_lm()
    model.save_pretrained(tmp_path, format="codestral")
    assert all(name.startswith("model.") for name in load_file(tmp_path / "consolidated.safetensors"))
    params = read_json(tmp_path / "params.json")
    assert (params["dim"], params["n_layers"], params["n_groups"], params["model_type"]) == (64, 2, 2, "mamba")
    edit_json(tmp_path / "params.json", mystery=3)
    loaded = MambaLM.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again", format="codestral")
    assert read_json(tmp_path / "again" / "params.json")["mystery"] == 3


def test_a_format_rejects_what_it_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match=r"transformers format cannot hold .*'d_intermediate': 0.*'d_intermediate': 7"):
        small_lm(d_intermediate=7).save_pretrained(tmp_path, format="transformers")
    with pytest.raises(ValueError, match=r"transformers format cannot hold .* knows Mamba1, Mamba2 blocks, got Mamba3"):
        small_lm("Mamba3").save_pretrained(tmp_path, format="transformers")
    with pytest.raises(ValueError, match=r"Codestral format cannot hold .*'d_state': 128.*'d_state': 16"):
        small_lm().save_pretrained(tmp_path, format="codestral")
    with pytest.raises(ValueError, match=r"format must be one of .*'gguf'"):
        small_lm().save_pretrained(tmp_path, format="gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_converted_config_may_carry_the_official_fields_too(tmp_path):
    """As the published mamba-130m-hf does; what transformers reads counts."""
    shutil.copytree(GOLDEN / "lm_hf_mamba", tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", d_model=32, n_layer=3, ssm_cfg={}, time_step_rank="auto")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format.name == "transformers"
    assert checkpoint.config.block_config().dt_width == 2
    assert checkpoint.config.extra["transformers"]["n_layer"] == 3


def test_groups_that_transformers_computes_otherwise_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="in 2 groups"):
        small_lm().save_pretrained(tmp_path, format="transformers")


def test_transformers_gates_first_whatever_its_config_says(tmp_path):
    shutil.copytree(GOLDEN / "lm_hf_mamba2", tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", norm_before_gate=True)
    config = open_checkpoint(tmp_path).config
    assert config.block_config().norm_before_gate is False
    assert config.extra["transformers"]["norm_before_gate"] is True


def test_weights_that_lose_digits_unasked_are_warned_of(tmp_path):
    model = small_lm(dtype=torch.bfloat16)
    mixer = model.backbone.layers[0].mixer
    mixer.A_log.data = mixer.A_log.data.float()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"read as torch.bfloat16.*layers.0.mixer.A_log.*dtype=torch.float32"):
        MambaLM.from_pretrained(tmp_path)
    MambaLM.from_pretrained(tmp_path, dtype=torch.bfloat16)  # asked for


@pytest.mark.parametrize("spelling", ["Infinity", '{"__float__": "Infinity"}', '"Infinity"'])
def test_infinity_is_read_in_every_spelling(spelling, tmp_path):
    shutil.copytree(GOLDEN / "lm_hf_mamba2", tmp_path, dirs_exist_ok=True)
    raw = read_json(tmp_path / "config.json")
    raw["time_step_limit"] = ["LOW", "HIGH"]
    text = json.dumps(raw).replace('"LOW"', "0.0").replace('"HIGH"', spelling)
    (tmp_path / "config.json").write_text(text)
    assert open_checkpoint(tmp_path).config.block_config().dt_limit == (0.0, float("inf"))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    small_lm().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = MambaLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.backbone.embedding.weight


@pytest.mark.parametrize("zip_form", [True, False])
def test_a_torch_file_with_a_tied_head_is_read(directory, zip_form):
    expected = MambaLM.from_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zip_form)
    (directory / "model.safetensors").unlink()
    assert same(MambaLM.from_pretrained(directory), expected)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_weights_are_read(directory, suffix):
    expected = MambaLM.from_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    table = {}
    for part in range(2):
        shard = {name: x for i, (name, x) in enumerate(tensors.items()) if i % 2 == part}
        file = f"{stem}-0000{part + 1}-of-00002.{suffix}"
        save_file(shard, directory / file) if suffix == "safetensors" else torch.save(shard, directory / file)
        table.update(dict.fromkeys(shard, file))
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    assert same(MambaLM.from_pretrained(directory), expected)

    (directory / file).rename(directory / "elsewhere")
    with pytest.raises(ValueError, match=f"the shard {file} is missing"):
        MambaLM.from_pretrained(directory)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ValueError, match=r"must be a file next to the index, got '\.\./outside.safetensors'"):
        MambaLM.from_pretrained(directory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_read_in_the_asked_dtype(dtype, directory):
    model, stored = MambaLM.from_pretrained(directory, dtype=dtype), load_file(directory / "model.safetensors")
    fresh = MambaLM(model.config, dtype=dtype)
    for name, x in model.state_dict().items():
        assert x.dtype == fresh.state_dict()[name].dtype, name
        if name in stored:
            assert torch.equal(x, stored[name].to(x.dtype)), name


MEASURE = """
import re, sys, torch
from anymamba.models import MambaLM

def private_bytes():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Dirty", "Private_Clean"))

def resident_bytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

for weights in (None, "int8", "int4"):
    MambaLM.from_pretrained(sys.argv[2], weights=weights)  # what the first call loads besides weights
open("/proc/self/clear_refs", "w").write("5")  # forget the peak
before, resident = private_bytes(), resident_bytes("VmRSS")
options = {"mapped": True} if sys.argv[4] == "mapped" else {} if sys.argv[4] == "read" else {"weights": sys.argv[4]}
model = MambaLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[3]), **options)
print(private_bytes() - before, resident_bytes("VmHWM") - resident, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "how"), [("float32", "mapped"), ("float32", "read"), ("bfloat16", "read")])
def test_loading_takes_the_memory_of_the_weights_once_and_mapped_ones_take_none(dtype, how, tmp_path):
    """In a process of its own: an allocator that has served others would hide or add what loading takes."""
    MambaLM(d_model=512, n_layer=8, vocab_size=4000, ssm_cfg={"layer": "Mamba2"}).save_pretrained(tmp_path / "large")
    small_lm().save_pretrained(tmp_path / "small")
    command = [sys.executable, "-c", MEASURE, tmp_path / "large", tmp_path / "small", dtype, how]
    kept, peak, weights = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert kept < (0.2 if how == "mapped" else 1.2) * weights
    assert peak < (0.3 if how == "mapped" else 1.2) * weights + 2**23  # the largest tensor, when it is converted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_loading_in_fewer_bits_takes_the_memory_of_the_quantized_weights_once(format, tmp_path):
    """The largest weight of the file alone, 48 MiB, would be more than all of them in four bits."""
    MambaLM(d_model=512, n_layer=8, vocab_size=24000, ssm_cfg={"layer": "Mamba2"}).save_pretrained(tmp_path / "large")
    small_lm().save_pretrained(tmp_path / "small")
    command = [sys.executable, "-c", MEASURE, tmp_path / "large", tmp_path / "small", "float32", format]
    kept, peak, weights = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert kept < 1.2 * weights
    assert peak < 1.3 * weights + 2**23  # what quantizing some rows takes


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "old bin"])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_a_tensor_is_read_some_rows_at_a_time(directory, suffix, rows):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if suffix != "safetensors":
        file = directory / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=suffix == "bin")
    name = next(name for name, x in tensors.items() if x.ndim == 2)
    with open_weight_file(file) as opened:
        parts = [part.clone() for part in opened.read_rows(name, torch.float64, None, rows)]
    assert [len(part) for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert torch.equal(torch.cat(parts), tensors[name].double())


def test_a_file_that_is_cut_short_while_it_is_read_is_rejected(directory):
    with open_weight_file(directory / "model.safetensors") as file:
        os.truncate(file.path, file.path.stat().st_size - 1)
        for name, stored in file.entries().items():
            last, dtype = name, stored.dtype
        with pytest.raises(ValueError, match=r"should have \d+ bytes, got \d+: the file was cut short"):
            file.read(last, dtype, mapped=False)
        with pytest.raises(ValueError, match=r"should have \d+ bytes, got \d+: the file was cut short"):
            list(file.read_rows(last, dtype, None, 2))
        with pytest.raises(ValueError, match=r"should have \d+ bytes, got \d+: the file was cut short"):
            file.read(last, dtype, mapped=True)


def test_values_are_checked_in_copies_of_a_file(directory, monkeypatch):
    """A view of a file that is cut short at the wrong moment would end the process."""
    checkpoint, read_into = open_checkpoint(directory), TensorFileReader.read_into

    def cut_and_read(reader, raw, name, begin=0):
        os.truncate(reader.path, 2**10)
        read_into(reader, raw, name, begin)

    monkeypatch.setattr(TensorFileReader, "read_into", cut_and_read)
    with pytest.raises(ValueError, match=r"should have \d+ bytes, got \d+: the file was cut short"):
        describe_non_finite_tensors(checkpoint)


def test_a_mapped_pickle_that_is_cut_short_is_rejected_before_it_is_read(directory):
    """Reading beyond the end of a mapped file would end the process."""
    path = directory / "pytorch_model.bin"
    torch.save(load_file(directory / "model.safetensors"), path)
    with open_weight_file(path) as file:
        os.truncate(path, 2**10)
        name, stored = list(file.entries().items())[-1]
        for mapped in (False, True):
            with pytest.raises(ValueError, match=r"pytorch_model.bin: should have \d+ bytes, got 1024"):
                file.read(name, stored.dtype, mapped=mapped)
        with pytest.raises(ValueError, match=r"pytorch_model.bin: should have \d+ bytes, got 1024"):
            next(file.read_rows(name, stored.dtype, None, 2))


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "old bin"])
@pytest.mark.parametrize("same_dtype", [True, False])
def test_a_loaded_model_does_not_change_with_its_file(directory, suffix, same_dtype):
    if suffix != "safetensors":
        file = directory / "pytorch_model.bin"
        tensors = load_file(directory / "model.safetensors")
        torch.save(tensors, file, _use_new_zipfile_serialization=suffix == "bin")
        (directory / "model.safetensors").unlink()
    else:
        file = directory / "model.safetensors"
    model = MambaLM.from_pretrained(directory, dtype=None if same_dtype else torch.float64)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\xff" * size)
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def test_loaded_weights_can_be_trained(directory):
    model, before = MambaLM.from_pretrained(directory), (directory / "model.safetensors").read_bytes()
    x = torch.randint(101, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert (directory / "model.safetensors").read_bytes() == before


def test_transformers_opens_what_we_write(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model = small_lm(ssm_cfg={"layer": "Mamba2", "d_state": 16, "headdim": 8})
    model.save_pretrained(tmp_path, format="transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "Mamba2ForCausalLM"
    x = torch.randint(61, (2, 19))
    exact = copy.deepcopy(model).double()(x).logits
    assert_near(theirs(x).logits, exact, MODEL_FLOOR)
    assert_near(model(x).logits, exact, MODEL_FLOOR)
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(MambaLM.from_pretrained(tmp_path / "theirs"), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_saving_and_looking_draw_nothing(family, tmp_path):
    """Whoever seeds torch gets the same numbers, whatever models are read and written in between."""
    model = small_lm(family, d_intermediate=10)
    before = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    open_checkpoint(tmp_path)
    MambaLM.from_pretrained(tmp_path)
    MambaLM.from_pretrained(tmp_path, dtype=torch.bfloat16, mapped=True)
    assert torch.equal(torch.get_rng_state(), before)


class TestNonFinite:
    """Weights that are infinite or not a number are reported in one line and loaded: one must open what one repairs."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_pattern_of_bits_is_judged_as_torch_does(self, dtype):
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        assert all(count_non_finite(x[i : i + 1]) == int(not torch.isfinite(x[i])) for i in range(0, 2**16, 17))
        assert count_non_finite(x) == int((~torch.isfinite(x)).sum())
        assert count_non_finite(x[torch.isfinite(x)]) == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_they_are_found_wherever_they_are(self, dtype, monkeypatch):
        monkeypatch.setattr("anymamba.checkpoints.weight_files._BLOCK", 8)
        largest = torch.finfo(dtype).max
        x = torch.tensor([largest, -largest, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype).repeat(5)
        assert count_non_finite(x) == count_non_finite(x.view(5, 5).T) == count_non_finite(x[:0]) == 0
        for value in (float("nan"), -float("nan"), float("inf"), -float("inf")):
            for index in range(25):
                y = x.clone()
                y[index] = y[0] = value
                assert count_non_finite(y) == (1 if index == 0 else 2)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_loading_warns(self, directory, value):
        tensors = load_file(directory / "model.safetensors")
        tensors["backbone.layers.1.mixer.A_log"][:2] = value
        tensors["backbone.norm_f.weight"][3] = -value
        save_file(tensors, directory / "model.safetensors")
        message = r"model: 2 tensors hold values that are not finite, first backbone.layers.1.mixer.A_log \(2 of 8\)$"
        with pytest.warns(UserWarning, match=message) as caught:
            model = MambaLM.from_pretrained(directory)
        assert len(caught) == 1
        assert not torch.isfinite(model.backbone.norm_f.weight[3])
        MambaLM.from_pretrained(directory, mapped=True)  # which nothing reads
        assert "2 tensors hold values" in describe_non_finite_tensors(open_checkpoint(directory))

    def test_a_number_that_is_too_large_for_the_asked_dtype_is_told_of(self, directory):
        tensors = load_file(directory / "model.safetensors")
        tensors["backbone.norm_f.weight"][3] = 1e6
        save_file(tensors, directory / "model.safetensors")
        assert describe_non_finite_tensors(open_checkpoint(directory)) == ""
        with pytest.warns(UserWarning, match=r"1 tensor holds .* first backbone.norm_f.weight \(1 of 32\)"):
            MambaLM.from_pretrained(directory, dtype=torch.float16)


class TestDamage:
    """Whatever is wrong with a checkpoint, one sentence says what."""

    def assert_rejected(self, directory, message):
        with pytest.raises(ValueError, match=message):
            MambaLM.from_pretrained(directory)

    @pytest.mark.parametrize("keep", [0, 7, 1000, -1])
    def test_truncated(self, directory, keep):
        content = (directory / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(content[:keep])
        self.assert_rejected(directory, "model.safetensors: not a readable safetensors file")

    def test_corrupt_header(self, directory):
        content = (directory / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(content[:8] + b"#" + content[9:])
        self.assert_rejected(directory, "model.safetensors: not a readable safetensors file")

    def test_foreign_tensors(self, directory):
        save_file({"a.weight": torch.ones(3), "b.weight": torch.ones(3)}, directory / "model.safetensors")
        self.assert_rejected(
            directory, "missing: backbone.embedding.weight, .* and 24 more; unexpected: a.weight, b.weight"
        )

    def test_wrong_shape(self, directory):
        tensors = load_file(directory / "model.safetensors")
        tensors["backbone.norm_f.weight"] = torch.ones(31)
        save_file(tensors, directory / "model.safetensors")
        self.assert_rejected(directory, r"of the wrong shape: backbone.norm_f.weight \(expected \(32,\), got \(31,\)\)")

    def test_integers_for_weights(self, directory):
        tensors = load_file(directory / "model.safetensors")
        tensors["backbone.norm_f.weight"] = torch.ones(32, dtype=torch.int8)
        save_file(tensors, directory / "model.safetensors")
        self.assert_rejected(directory, r"of a dtype that weights cannot have: backbone.norm_f.weight \(torch.int8\)")

    def test_config_that_contradicts_the_weights(self, directory):
        edit_json(directory / "config.json", n_layer=4)
        self.assert_rejected(directory, r"missing: backbone.layers.3")
        edit_json(directory / "config.json", n_layer=2)
        self.assert_rejected(directory, r"unexpected: backbone.layers.2")
        edit_json(directory / "config.json", n_layer=3, tie_embeddings=False)
        self.assert_rejected(directory, "missing: lm_head.weight")
        edit_json(directory / "config.json", tie_embeddings=True, d_model=48)
        self.assert_rejected(directory, "of the wrong shape")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_layer": 10_000}, r"asks for 10000 layers, and there are \d+ tensors in all"),
            ({"n_layer": 2**31 - 1}, "asks for 2147483647 layers"),
            ({"n_layer": 10**400}, "n_layer must be a number of at most 2,147,483,647, got 1000"),
            ({"vocab_size": 2**62}, "vocab_size must be a number of at most 2,147,483,647, got 4611686018427387904"),
            ({"vocab_size": 2**31 - 1}, "asks for a tensor of 68,719,476,736 numbers, more than the files hold"),
            ({"pad_vocab_size_multiple": 2**31 - 1}, "asks for a tensor of 68,719,476,704 numbers"),
            ({"d_model": 2**31 - 2}, "asks for a tensor of|d_inner|headdim"),
            ({"d_intermediate": 2**31 - 1}, "asks for a tensor of 137,438,953,472 numbers"),
            ({"ssm_cfg": {"layer": "Mamba2", "d_state": 10**400}}, "d_state.* must be a number of at most"),
            ({"ssm_cfg": {"layer": "Mamba2", "d_state": 2**31 - 1, "headdim": 1}}, "asks for a tensor of"),
            ({"ssm_cfg": {"layer": "Mamba1", "d_state": 2**30}}, "asks for a tensor of"),
            ({"ssm_cfg": {"layer": "Mamba1", "dt_rank": 2**30}}, "asks for a tensor of"),
            ({"ssm_cfg": {"layer": "Mamba2", "expand": 1e9, "headdim": 64}}, "asks for a tensor of"),
            ({"ssm_cfg": {"layer": "Mamba2", "expand": 1e300}}, "expand.* must be a number of at most"),
            (
                {"ssm_cfg": {"layer": "Mamba3", "headdim": 8, "is_mimo": True, "mimo_rank": 2**30}},
                "asks for a tensor of",
            ),
            ({"ssm_cfg": {"layer": "Mamba3", "headdim": 8, "A_floor": float("nan")}}, "A_floor.* must be a number"),
            (
                {"ssm_cfg": {"layer": "Mamba3", "headdim": 8, "rotation_range": float("inf")}},
                "rotation_range.* must be",
            ),
            ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0, 10**400]}}, "dt_limit.* must be a number of at most"),
            ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": 3}}, "model: "),
            ({"ssm_cfg": {"layer": ["Mamba2"]}}, "must be one of Mamba1, Mamba2, Mamba3"),
        ],
        ids=lambda x: json.dumps(x)[:70],
    )
    def test_a_config_that_asks_for_more_than_there_is_is_rejected_at_once(self, directory, changes, message):
        edit_json(directory / "config.json", **changes)
        began = perf_counter()
        with pytest.raises(ValueError, match=message) as caught:
            open_checkpoint(directory)
        assert perf_counter() - began < 2  # seconds; building all that took half a minute, or the machine's memory
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("limit", [10**400, "1e999", [10**400, 1], "x", None, 7])
    def test_a_transformers_config_with_odd_numbers(self, tmp_path, limit):
        shutil.copytree(GOLDEN / "lm_hf_mamba2", tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "config.json", time_step_limit=limit if isinstance(limit, list) else [0.0, limit])
        if limit == "1e999":  # infinity, however it is spelled
            assert open_checkpoint(tmp_path).config.block_config().dt_limit == (0.0, float("inf"))
        elif limit == 7:
            assert open_checkpoint(tmp_path).config.block_config().dt_limit == (0.0, 7.0)
        else:
            self.assert_rejected(tmp_path, str(tmp_path))

    @pytest.mark.parametrize("depth", [100, 900, 10**5])
    def test_a_config_that_is_nested_deeply(self, directory, depth):
        content = (directory / "config.json").read_text().rstrip().removesuffix("}")
        (directory / "config.json").write_text(content + f', "mystery": {"[" * depth}{"]" * depth}}}')
        self.assert_rejected(directory, r"config.json: not readable JSON \(nested too deeply\)")

    @pytest.mark.parametrize(
        ("odd", "message"),
        [
            (lambda x: x.to_sparse(), r"a sparse one \(torch.sparse_coo\)"),
            (lambda x: x.to_sparse_csr(), r"a sparse one \(torch.sparse_csr\)"),
            (lambda x: x.to("meta"), "one on the meta device"),
            (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "a quantized one"),
            (lambda x: torch.nested.nested_tensor([x, x[:1]]), "a nested one"),
            (lambda x: torch.ones(1, 1).expand(x.shape), "one that repeats its values"),
        ],
        ids=["coo", "csr", "meta", "quantized", "nested", "expanded"],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_a_torch_file_with_a_tensor_that_is_not_plain(self, directory, odd, message):
        tensors = load_file(directory / "model.safetensors")
        name = "backbone.layers.1.mixer.in_proj.weight"
        torch.save({**tensors, name: odd(tensors[name])}, directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
        self.assert_rejected(directory, rf"pytorch_model.bin: {name} must be a plain tensor, got {message}")

    def test_a_torch_file_whose_names_are_none(self, directory):
        (directory / "model.safetensors").unlink()
        torch.save({1: torch.ones(1)}, directory / "pytorch_model.bin")
        self.assert_rejected(directory, "expected a table of tensors by name")

    def test_tied_config_with_two_different_weights(self, directory):
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"] + 1
        save_file(tensors, directory / "model.safetensors")
        self.assert_rejected(directory, "two different ones")

    def test_a_key_that_maps_twice(self, tmp_path):
        shutil.copytree(GOLDEN / "lm_hf_mamba2", tmp_path, dirs_exist_ok=True)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["backbone.embedding.weight"] = tensors["backbone.embeddings.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors")
        self.assert_rejected(tmp_path, "present twice: backbone.embedding")

    def test_a_pickle_with_code(self, directory):
        class Bomb:
            def __reduce__(self):
                return (open, (str(directory / "exploded"), "w"))

        (directory / "model.safetensors").unlink()
        for save in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))):
            save({"a": Bomb()}, directory / "pytorch_model.bin")
            self.assert_rejected(directory, "pytorch_model.bin: rejected, because it holds more than tensors")
        assert not (directory / "exploded").exists()

    def test_a_torch_file_that_is_none(self, directory):
        (directory / "model.safetensors").unlink()
        (directory / "pytorch_model.bin").write_bytes(b"")
        self.assert_rejected(directory, "pytorch_model.bin")
        torch.save([1, 2], directory / "pytorch_model.bin")
        self.assert_rejected(directory, "expected a table of tensors by name")

    def test_config_files_that_are_none(self, directory):
        for content, message in (
            ("{", "config.json: not readable JSON"),
            ("[]", "expected a JSON object, got list"),
            ('{"model_type": "llama", "hidden_size": 3}', "expected .*\"mamba2\" .* got 'llama'"),
            ('{"size": 3}', "a config of an unknown kind in config.json"),
            ('{"model_type": "anymamba_classifier"}', "anymamba_classifier, which anymamba predict and"),
        ):
            (directory / "config.json").write_text(content)
            self.assert_rejected(directory, message)
        (directory / "config.json").unlink()
        self.assert_rejected(directory, "no config.json or params.json")
        for step in ("step-00000005", "step-00000010"):
            shutil.copytree(GOLDEN / "lm_hf_mamba2", directory / "checkpoints" / step)
        self.assert_rejected(directory, "a run that is not finished; .* opens as a model: .*step-00000010")

    def test_transformers_configs_we_cannot_compute(self, tmp_path):
        shutil.copytree(GOLDEN / "lm_hf_mamba2", tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "config.json", hidden_act="gelu")
        self.assert_rejected(tmp_path, "must have hidden_act = 'silu', got 'gelu'")
        edit_json(tmp_path / "config.json", hidden_act="silu", num_heads=5)
        self.assert_rejected(tmp_path, "num_heads must be .* = 8, got 5")

    def test_no_weights(self, directory):
        (directory / "model.safetensors").unlink()
        self.assert_rejected(directory, "expected weights in one of model.safetensors, pytorch_model.bin, found none")

    def test_a_mamba1_that_is_another_model(self, tmp_path):
        shutil.copytree(GOLDEN / "lm_hf_mamba", tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "config.json", intermediate_size=65)
        self.assert_rejected(tmp_path, "intermediate_size must be .* = 64, got 65")
        edit_json(tmp_path / "config.json", intermediate_size=64, model_type="zamba")
        self.assert_rejected(tmp_path, 'with "model_type": "mamba" or .*"granitemoehybrid", got \'zamba\'')

    def test_a_file_or_nothing(self, directory):
        self.assert_rejected(directory / "config.json", "expected a directory .*got a file")
        self.assert_rejected(directory / "nothing", "no such directory, and not the id of a hub repository")


class TestSaving:
    def test_a_full_disk_leaves_what_was_there(self, directory, monkeypatch):
        before = {path.name: path.read_bytes() for path in directory.iterdir()}

        def full_disk(path, tensors, metadata):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("anymamba.core.io.save_tensors", full_disk)
        with pytest.raises(OSError, match="No space left"):
            small_lm().save_pretrained(directory)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before

    def test_a_model_may_be_saved_over_the_file_it_is_mapped_from(self, directory):
        model = MambaLM.from_pretrained(directory, mapped=True)
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        model.save_pretrained(directory)
        for loaded in (model, MambaLM.from_pretrained(directory)):
            assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())

    def assert_rejected(self, model, directory, message):
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(directory / "out")
        assert not (directory / "out").exists()

    def test_a_head_of_its_own_under_a_tied_config_is_rejected_and_not_dropped(self, tmp_path):
        model, x = small_lm(), torch.randint(61, (1, 9))
        model.lm_head = torch.nn.Linear(32, 64, bias=False)
        self.assert_rejected(
            model, tmp_path, r"two different ones; to keep both, .*tie_embeddings=False.*model.tie_weights\(\)"
        )
        model.config = dataclasses.replace(model.config, tie_embeddings=False)
        model.save_pretrained(tmp_path / "both")
        assert torch.equal(MambaLM.from_pretrained(tmp_path / "both")(x).logits, model(x).logits)

    def test_a_head_with_the_embeddings_values_is_saved_as_tied(self, tmp_path):
        model = small_lm()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.save_pretrained(tmp_path)
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")

    def test_weights_that_do_not_fit_the_config_are_rejected_before_anything_is_written(self, tmp_path):
        class Adapter(torch.nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base
                self.down = torch.nn.Linear(base.in_features, 2)

        model = small_lm()
        mixer = model.backbone.layers[1].mixer
        mixer.in_proj = Adapter(mixer.in_proj)
        self.assert_rejected(
            model, tmp_path, r"do not fit .*missing: .*1.mixer.in_proj.weight; unexpected: .*in_proj.base.weight"
        )
        model = small_lm()
        torch.nn.utils.parametrizations.weight_norm(model.backbone.layers[0].mixer.in_proj)
        self.assert_rejected(model, tmp_path, "unexpected: .*in_proj.parametrizations.weight.original0.*merge adapters")
        model = small_lm(tie_embeddings=False)
        model.backbone.embedding = torch.nn.Embedding(70, 32)
        self.assert_rejected(
            model, tmp_path, r"of the wrong shape: backbone.embedding.weight \(expected \(64, 32\), got \(70, 32\)\)"
        )
        model = small_lm()
        model.config.ssm_cfg["d_state"] = 32
        self.assert_rejected(model, tmp_path, "of the wrong shape")
        model = small_lm()
        model.backbone.norm_f.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
        self.assert_rejected(model, tmp_path, r"backbone.norm_f.weight \(torch.int8\)")

    @pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
    def test_weights_may_be_read_by_whom_the_umask_allows(self, tmp_path):
        before = os.umask(0o027)
        try:
            small_lm().save_pretrained(tmp_path)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


class TestHub:
    def test_a_repository_is_fetched_with_one_kind_of_weights(self, monkeypatch, tmp_path):
        hub = pytest.importorskip("huggingface_hub")
        asked = []

        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            shutil.copy(GOLDEN / "lm_mamba2" / "config.json", tmp_path)
            if "model.safetensors" in allow_patterns:
                shutil.copy(GOLDEN / "lm_mamba2" / "model.safetensors", tmp_path)
            return str(tmp_path)

        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        assert same(MambaLM.from_pretrained("some/model"), MambaLM.from_pretrained(GOLDEN / "lm_mamba2"))
        assert asked == [
            ("some/model", ["*.json"]),
            ("some/model", ["*.json", "*.jinja", "model.safetensors", "model-*.safetensors"]),
        ]

    def test_offline_says_what_to_pass_instead(self, monkeypatch):
        hub = pytest.importorskip("huggingface_hub")

        def snapshot_download(name, allow_patterns):
            raise hub.errors.LocalEntryNotFoundError("no connection\nand more")

        monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
        with pytest.raises(
            ValueError,
            match=r"it could not be fetched from the hub \(no connection\); pass a directory that holds .* instead",
        ):
            MambaLM.from_pretrained("some/model")

    def test_without_the_library_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ValueError, match=r"pip install 'anymamba\[hf\]'"):
            MambaLM.from_pretrained("some/model")
