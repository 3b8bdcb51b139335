"""GGUF files as llama.cpp's converter lays them out, and checkpoints of fla."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anymamba import MambaLM
from anymamba.checkpoints.open import open_checkpoint
from anymamba.checkpoints.weight_files import open_weight_file
from anymamba.cli.main import main
from anymamba.generation.tokenizers import load_tokenizer
from tests.support import assert_near

gguf = pytest.importorskip("gguf")
IDS = torch.arange(14).reshape(2, 7)
NAMES = {  # by the names that llama.cpp's converter gives them
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}
MODELS = {
    "mamba": {"ssm_cfg": {"layer": "Mamba1", "d_state": 8, "dt_rank": 3}, "tie_embeddings": True},
    "falcon": {"ssm_cfg": {"layer": "Mamba1", "d_state": 8, "dt_rank": 3, "inner_norms": "plain"}},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 16, "ngroups": 2}, "tie_embeddings": False},
}


def lively(name):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_layer": 2, "vocab_size": 300, "pad_vocab_size_multiple": 1}
    model = MambaLM(**sizes, **MODELS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write(model, path, kind=gguf.GGMLQuantizationType.F32, tokenizer=True, **fields):
    """Write a model as llama.cpp's converter does: A itself, no axis of one in the convolution, one more in Mamba-2."""
    block, layer = model.config.block_config(), model.config.layer
    arch = "mamba" if layer == "Mamba1" else "mamba2"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(model.config.n_layer)
    writer.add_embedding_length(model.config.d_model)
    writer.add_ssm_conv_kernel(block.d_conv)
    writer.add_ssm_inner_size(block.d_inner)
    writer.add_ssm_state_size(block.d_state)
    writer.add_ssm_time_step_rank(block.dt_width if layer == "Mamba1" else block.nheads)
    writer.add_layer_norm_rms_eps(fields.pop("eps", 1e-5))
    if layer == "Mamba1":
        writer.add_ssm_dt_b_c_rms(block.inner_norms == "plain")
    else:
        writer.add_ssm_group_count(block.ngroups)
    if tokenizer:
        tokens = [chr(c) if 33 <= c <= 126 else f"<{c}>" for c in range(256)]
        tokens[32], tokens[10] = "Ġ", "Ċ"
        tokens += ["he", "<|endoftext|>", *(f"[PAD{i}]" for i in range(258, 300))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(fields.pop("pre", "olmo"))
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 257 + [3] + [5] * 42)
        writer.add_token_merges(["h e"])
        writer.add_eos_token_id(257)
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_embeddings:
            continue
        ends = {"backbone.embedding.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight"}
        number, _, rest = name.removeprefix("backbone.layers.").partition(".")
        theirs = f"blk.{number}.{NAMES[rest]}" if ".layers." in name else ends.get(name, "output.weight")
        if rest == "mixer.A_log":
            x = -torch.exp(x)
        if rest == "mixer.conv1d.weight":
            x = x.squeeze(1)
        if layer == "Mamba2" and rest in ("mixer.A_log", "mixer.D"):
            x = x.unsqueeze(1)
        if rest == "mixer.norm.weight":
            x = x.reshape(block.ngroups, -1)
        data = x.numpy()
        plain = data.ndim < 2 or "ssm_a" in theirs or "conv1d" in theirs or "ssm_d" in theirs or "ssm_norm" in theirs
        if plain or data.shape[-1] % 32:
            writer.add_tensor(theirs, data)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_is_the_model_it_was_made_of(name, tmp_path):
    model = lively(name)
    path = write(model, tmp_path / "model.gguf")
    opened = MambaLM.from_pretrained(path)
    assert opened.config.tie_embeddings == model.config.tie_embeddings
    for (key, x), y in zip(model.state_dict().items(), opened.state_dict().values(), strict=True):
        if key.endswith("A_log"):
            assert_near(y, x, 1e-6, key)  # its exponential was stored
        else:
            assert torch.equal(x, y), key
    with torch.no_grad():
        assert_near(opened(IDS).logits, model(IDS).logits, 1e-5)


@pytest.mark.parametrize(("kind", "error"), [("F16", 6e-3), ("BF16", 5e-2), ("Q8_0", 6e-2), ("Q4_0", 0.8)])
def test_quantized_files_are_read(kind, error, tmp_path):
    model, quantized = lively("mamba2"), gguf.GGMLQuantizationType[kind]
    path = write(model, tmp_path / "model.gguf", quantized)
    weight = open_checkpoint(path).tensors["backbone.layers.0.mixer.in_proj.weight"][2]
    assert weight.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    opened = MambaLM.from_pretrained(path, dtype=torch.float32)
    in_proj = model.backbone.layers[0].mixer.in_proj.weight.detach()
    rounded = gguf.quants.dequantize(gguf.quants.quantize(in_proj.numpy(), quantized), quantized)
    assert np.array_equal(opened.backbone.layers[0].mixer.in_proj.weight.detach().numpy(), rounded)
    with torch.no_grad():
        assert_near(opened(IDS).logits, model(IDS).logits, error)


def test_its_tokenizer_is_read_and_goes_with_it(tmp_path, capsys):
    path = write(lively("mamba"), tmp_path / "model.gguf")
    tokenizer = load_tokenizer(None, path, 300)
    assert tokenizer.encode("he said\n") == [256, 32, *b"said", 10]
    assert tokenizer.decode([256, 32, 115, 257]) == "he s"
    assert tokenizer.end == [257]
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert "copied tokenizer.json, tokenizer_config.json" in capsys.readouterr().out
    assert load_tokenizer(None, tmp_path / "out", 300).encode("he") == [256]
    capsys.readouterr()
    outputs = []
    for model in (path, tmp_path / "out"):
        assert main(["generate", str(model), "--prompt", "he", "--max-new-tokens", "5", "--ignore-end"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert main(["info", str(path)]) == 0
    assert "Mamba1, gguf format" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.write_bytes(b"GGUF" + bytes(40)), "not a readable GGUF file"),
        (lambda path: write(lively("mamba"), path, eps=1e-6), "must have eps = 1e-05, got 1e-06"),
        (lambda path: gguf_of_another_kind(path), 'expected a GGUF file of architecture "mamba" or "mamba2", got'),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(make, error, tmp_path, capsys):
    make(tmp_path / "model.gguf")
    assert main(["info", str(tmp_path / "model.gguf")]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


def test_a_gguf_file_that_is_cut_short_is_rejected_before_it_is_read(tmp_path):
    """Reading beyond the end of a mapped file would end the process."""
    path = write(lively("mamba2"), tmp_path / "model.gguf")
    with open_weight_file(path) as file:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"model.gguf: should have \d+ bytes, got \d+: the file was cut short"):
            file.read("output_norm.weight", torch.float32, mapped=False)


def gguf_of_another_kind(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tokenizers_of_other_kinds_are_rejected(tmp_path):
    path = write(lively("mamba"), tmp_path / "a.gguf", pre="qwen2")
    with pytest.raises(ValueError, match=r"of a kind that cannot be read \(qwen2\); pass one with --tokenizer"):
        load_tokenizer(None, path, 300)
    path = write(lively("mamba"), tmp_path / "b.gguf", tokenizer=False)
    with pytest.raises(ValueError, match="the file has no tokenizer"):
        load_tokenizer(None, path, 300)


FLA = {
    "mamba": ({"state_size": 8, "time_step_rank": 3}, {"layer": "Mamba1", "d_state": 8, "dt_rank": 3}),
    "mamba2": ({"state_size": 16, "head_dim": 16}, {"layer": "Mamba2", "d_state": 16, "headdim": 16}),
    "mamba3": (
        {"state_size": 16, "head_dim": 16, "is_mimo": True, "mimo_rank": 2},
        {"layer": "Mamba3", "d_state": 16, "headdim": 16, "is_mimo": True, "mimo_rank": 2, "a_activation": "softplus"},
    ),
}


@pytest.mark.parametrize("kind", FLA)
def test_checkpoints_of_fla_are_read(kind, tmp_path):
    theirs, ours = FLA[kind]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "norm_eps": 1e-5, "fuse_norm": True}
    raw = {"model_type": kind, **sizes, **theirs}
    model = MambaLM(
        d_model=32, n_layer=2, vocab_size=40, ssm_cfg=ours, tie_embeddings=False, residual_in_fp32=kind != "mamba"
    ).eval()
    state = {k.replace("backbone.embedding.", "backbone.embeddings."): x for k, x in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    opened = MambaLM.from_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).format.name == "fla"
    assert torch.equal(opened(IDS).logits, model(IDS).logits)
    opened.save_pretrained(tmp_path / "official")
    again = MambaLM.from_pretrained(tmp_path / "official")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="the fla format can be read but not written"):
        opened.save_pretrained(tmp_path / "fla", format="fla")


@pytest.mark.parametrize(
    ("field", "error"), [({"norm_eps": 1e-6}, "norm_eps = 1e-05, got 1e-06"), ({"n_groups": 2}, "n_groups = 1")]
)
def test_models_of_fla_that_cannot_be_computed_are_rejected(field, error, tmp_path):
    raw = {"model_type": "mamba2", "hidden_size": 32, "norm_eps": 1e-5, **field}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=error):
        MambaLM.from_pretrained(tmp_path)
