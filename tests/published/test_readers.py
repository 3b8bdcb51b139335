"""The readers of published files, on tiny clones that are made here: what they compute, and what they reject."""

import io
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from anymamba import Mamba3, MambaLM, MambaLMConfig
from tests.published import __main__ as command
from tests.published import captures, interpreted, motion, prices, proteins
from tests.published.clone import Clone, MissingFileError, find_clone
from tests.published.row import Options, same_digits

GIT = ("git", "-c", "user.name=tests", "-c", "user.email=tests@example.org")


def commit_files(directory, files):
    """Make a repository with these files, and return a clone of its commit."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run([*GIT, "init", "-q", str(directory)], check=True)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    subprocess.run([*GIT, "-C", str(directory), "add", "-A"], check=True)
    subprocess.run([*GIT, "-C", str(directory), "commit", "-q", "-m", "files"], check=True)
    commit = subprocess.run([*GIT, "-C", str(directory), "rev-parse", "HEAD"], capture_output=True, check=True)
    return Clone(directory, commit.stdout.decode().strip())


def saved(value):
    """Return the bytes that torch saves for a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archived(**arrays):
    """Return the bytes of a .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def assert_one_line(error, *parts):
    """Assert that a message has one line, and these parts."""
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# Clones


def test_a_clone_is_found_by_its_commit_bare_or_not_and_read_there(tmp_path):
    clone = commit_files(tmp_path / "a" / "b" / "work", {"file.txt": "first"})
    commit_files(tmp_path / "a" / "other", {"file.txt": "other"})
    (clone.directory / "file.txt").write_text("changed since")
    assert find_clone(tmp_path, clone.commit).read_text("file.txt") == "first"
    subprocess.run([*GIT, "clone", "-q", "--bare", clone.directory, tmp_path / "bare" / "repo"], check=True)
    assert find_clone(tmp_path / "bare", clone.commit).read_text("file.txt") == "first"
    assert find_clone(tmp_path, "0" * 40) is None


def test_a_file_that_a_partial_clone_lacks_is_told_from_one_that_is_not_there(tmp_path):
    clone = commit_files(tmp_path / "clone", {"large.bin": "large"})
    digest = subprocess.run(["git", "hash-object", clone.directory / "large.bin"], capture_output=True, check=True)
    name = digest.stdout.decode().strip()
    (clone.directory / ".git" / "objects" / name[:2] / name[2:]).unlink()
    with pytest.raises(MissingFileError) as error:
        clone.read("large.bin")
    assert_one_line(error, "large.bin", "partial")
    with pytest.raises(MissingFileError) as error:
        clone.read("small.bin")
    assert_one_line(error, "small.bin", "no such file")


class _Dangerous:
    def __reduce__(self):
        return (pytest.fail, ("a pickle ran code",))


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (lambda clone: clone.read_pickle("file", "state_dict"), pickle.dumps(_Dangerous())),
        (lambda clone: clone.read_pickle("file", "state_dict"), saved({"state_dict": _Dangerous})),
        (lambda clone: clone.read_pickle("file", "state_dict"), b"no pickle"),
        (lambda clone: clone.read_pickle("file", "state_dict"), saved({"weights": torch.ones(2)})),
        (lambda clone: clone.read_pickle("file"), saved([1, 2])),
        (lambda clone: clone.read_arrays("file", "out"), b"no archive"),
        (lambda clone: clone.read_arrays("file", "out"), b""),
        (lambda clone: clone.read_arrays("file", "out"), archived(out=np.array([{}], dtype=object))),
        (lambda clone: clone.read_arrays("file", "out"), archived(other=np.ones(2))),
        (lambda clone: clone.read_json("file", "cases"), "{"),
        (lambda clone: clone.read_json("file", "cases"), "[]"),
        (lambda clone: clone.read_json("file", "cases"), b"\xff"),
        (lambda clone: clone.read_table("file", 3), "1 2 3 4"),
        (lambda clone: clone.read_table("file", 3), "1 2 three"),
    ],
)
def test_foreign_files_are_rejected_in_one_line(tmp_path, read, content):
    clone = commit_files(tmp_path / "clone", {"file": content})
    with pytest.raises(ValueError, match="file: ") as error:
        read(clone)
    assert_one_line(error)


def test_a_figure_agrees_if_its_printed_digits_do():
    assert same_digits("RMSE", "1598.1", 1598.0921).agrees
    assert not same_digits("RMSE", "1598.1", 1598.1521).agrees


# Prices


def price_files(num_features, num_days=14, d_state=3):
    """Return a clone's files with one model of random weights, and the model."""
    model = prices.PriceModel([num_days, 6, 1], num_layers=2, d_state=d_state, num_features=num_features)
    state = {prices.PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    lines = [",Open,High,Low,Close,Volume,Timestamp"]
    lines += [f"{i},{100 + i},{110 + i},{90 + i},{105 + 2 * i},{i}e9,{1000 + i}" for i in range(20)]
    return {prices.TEST_DAYS: "\n".join(lines), "model.ckpt": saved({"state_dict": state})}, model


@torch.no_grad()
def test_a_price_model_is_read_from_its_tensors_and_its_windows_end_before_the_predicted_day(tmp_path):
    files, model = price_files(num_features=6)
    clone = commit_files(tmp_path / "clone", files)
    read = prices.read_model(clone, "model.ckpt")
    windows, targets = prices.read_windows(clone, 6, 14)
    assert windows.shape == (20 - 15, 6, 14)
    assert torch.equal(windows[1, 5], torch.arange(1.0, 15.0))  # volumes in billions
    assert torch.equal(windows[1, 0], torch.arange(1001.0, 1015.0))
    assert torch.equal(targets, 105 + 2 * torch.arange(14.0, 19.0))
    assert torch.equal(read(windows), model.eval()(windows))


def test_price_models_of_another_kind_are_rejected(tmp_path):
    files, model = price_files(num_features=5)
    state = {prices.PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    wrong = {**state, "model.blocks.0.1.op.D": torch.ones(3)}
    clone = commit_files(
        tmp_path / "clone",
        {
            **files,
            "wrong.ckpt": saved({"state_dict": wrong}),
            "other.ckpt": saved({"state_dict": {"a": torch.ones(1)}}),
        },
    )
    with pytest.raises(ValueError, match=r"wrong\.ckpt") as error:
        prices.read_model(clone, "wrong.ckpt")
    assert_one_line(error, "blocks.0.1.op.D", "(28,)", "(3,)")
    with pytest.raises(ValueError, match=r"other\.ckpt") as error:
        prices.read_model(clone, "other.ckpt")
    assert_one_line(error)


def test_published_errors_are_read_from_the_table(tmp_path):
    table = (
        "| Model | RMSE | MAPE | MAE | P |\n| Other | 1 | 2 | 3 | 4k |\n| Ours | **1713.0** | **2.171** | 1200.9 | 1k |"
    )
    clone = commit_files(tmp_path / "clone", {"README.md": table})
    assert prices.read_published(clone, "Ours") == ["1713.0", "2.171", "1200.9"]
    with pytest.raises(ValueError, match=r"README\.md"):
        prices.read_published(clone, "Neither")


# Motion


def motion_files(run, split_mode="random", task="binary"):
    """Return a clone's files with a tiny run, whose predictions are our own."""
    sizes = {"d_model": 16, "d_state": 8, "expand": 2, "headdim": 8, "n_layers": 1, "chunk_size": 16}
    config = {"window_size": 16, "stride": 8, "train_ratio": 0.7, "seed": 3, "split_mode": split_mode, "task": task}
    num_classes = 7 if task == "direction" else 2
    model = motion.MotionClassifier(3, num_classes, sizes).eval()
    checkpoint = {
        "model_name": "mamba3",
        "channel_mode": "gyro",
        "model_config": sizes,
        "config": config,
        "state_dict": model.state_dict(),
        "normalization": {"mean": [[0.1, 0.2, 0.3]], "std": [[1.0, 2.0, 4.0]]},
    }
    files = {f"{run}/best.pt": saved(checkpoint)}
    generator = np.random.default_rng(5)
    labels = []
    samples = {}
    for subject in (1, 2, 3, 4):
        for sensor in ("acc", "gyro"):
            samples[subject] = generator.normal(size=(64, 3)).astype(np.float32)
            text = "\n".join(" ".join(map(repr, map(float, line))) for line in samples[subject])
            files[f"{motion.RAW}/{sensor}_exp{subject:02d}_user{subject:02d}.txt"] = text
        labels += [f"{subject} {subject} 1 1 32", f"{subject} {subject} 8 33 64"]
    files[f"{motion.RAW}/labels.txt"] = "\n".join(labels)
    statistics = (np.array([0.1, 0.2, 0.3], np.float32), np.array([1.0, 2.0, 4.0], np.float32))
    inputs = torch.from_numpy(np.stack([(samples[2][s : s + 16] - statistics[0]) / statistics[1] for s in (3, 40)]))
    with torch.no_grad():
        predictions = model(inputs).argmax(-1).tolist()
    files[f"{run}/test_predictions.json"] = json.dumps(
        {
            "y_true": [0, 1],
            "y_pred": predictions,
            "test_exp_ids": [2, 2],
            "test_user_ids": [2, 2],
            "test_window_starts": [3, 40],
            "test_activity_ids": [1, 8],
        }
    )
    return files, predictions


@pytest.mark.parametrize(("split_mode", "task"), [("random", "binary"), ("subject", "direction")])
@torch.no_grad()
def test_a_motion_run_is_read_with_its_windows_and_class_weights(tmp_path, split_mode, task):
    files, predictions = motion_files("run", split_mode, task)
    clone = commit_files(tmp_path / "clone", files)
    recordings = motion.Recordings(clone)
    # Each stretch of 32 samples has three windows of 16; the first sample counts as 1.
    windows = recordings.windows(16, 8)
    assert [(x.recording, x.start, x.activity) for x in windows[:4]] == [
        ((1, 1), 0, 1),
        ((1, 1), 8, 1),
        ((1, 1), 16, 1),
        ((1, 1), 32, 8),
    ]
    ours, published, loss = motion.run_model(clone, "run", recordings, None)
    assert ours.tolist() == published.tolist() == predictions
    assert 0 < loss < 10
    num_classes = 2 if task == "binary" else 7
    labels = motion.classify([x.activity for x in windows], num_classes)
    assert set(labels) == ({0, 1} if task == "binary" else {0, 2})
    config = {"train_ratio": 0.7, "seed": 3, "split_mode": split_mode}
    weights = motion.class_weights(windows, labels, config, num_classes)
    # Both classes are equally frequent: 16 of 24 windows of the random split, 18 of three subjects.
    count = 8 if split_mode == "random" else 9
    assert weights[0] == pytest.approx(2 * count / (num_classes * count))


@torch.no_grad()
def test_motion_runs_are_compared_by_group_and_quickly_one_of_each(tmp_path):
    files = {}
    for group in motion.GROUPS:
        for seed in (1, 2):
            run = f"{motion.RUNS}/{group}/seed{seed}/mamba3_gyro"
            files |= motion_files(run)[0] | {f"{run}/test_metrics.json": json.dumps({"loss": 0.1})}
            files[f"{motion.RUNS}/{group}/seed{seed}/cnn_gyro/best.pt"] = b"not ours"
    clone = commit_files(tmp_path / "clone", files)
    for is_quick, num_models in ((False, 12), (True, 6)):
        figures = motion.compare(clone, Options(is_quick=is_quick))
        assert len(figures) == 2 * len(motion.GROUPS) + 1
        assert figures[-1].published == f"{2 * num_models} classes"
        assert figures[-1].agrees
        assert not figures[1].agrees  # the loss is none of these models'


def test_damaged_motion_runs_are_rejected(tmp_path):
    files, _ = motion_files("run")
    table = json.loads(files["run/test_predictions.json"])
    checkpoint = torch.load(io.BytesIO(files["run/best.pt"]), weights_only=True)
    checkpoint["state_dict"].pop("head.bias")
    clone = commit_files(
        tmp_path / "clone",
        {
            **files,
            "late/best.pt": files["run/best.pt"],
            "late/test_predictions.json": json.dumps({**table, "test_window_starts": [3, 49]}),
            "short/best.pt": files["run/best.pt"],
            "short/test_predictions.json": json.dumps({**table, "y_true": [0]}),
            "other/best.pt": saved({**checkpoint, "model_name": "cnn"}),
            "headless/best.pt": saved(checkpoint),
        },
    )
    recordings = motion.Recordings(clone)
    for run, part in (
        ("late", "sample 49 of 64"),
        ("short", "one length"),
        ("other", "'cnn'"),
        ("headless", "head.bias"),
    ):
        with pytest.raises(ValueError, match=run) as error:
            motion.run_model(clone, run, recordings, None)
        assert_one_line(error, part)


# Proteins


def test_proteins_are_read_with_the_repositorys_own_vocabulary_which_is_not_run(tmp_path):
    source = "import does_not_exist\nAA_TO_ID = {'<cls>': 0, 'A': 5, 'G': 6}\nraise SystemExit\n"
    clone = commit_files(
        tmp_path / "clone", {proteins.VOCABULARY: source, proteins.ALIGNMENT: ">first\nA-g\nG\n>second\nGA\n"}
    )
    vocabulary = proteins.read_vocabulary(clone)
    assert [ids.tolist() for ids in proteins.read_proteins(clone, vocabulary)] == [[0, 5, 6, 6], [0, 6, 5]]
    for files in (
        {proteins.VOCABULARY: "AA_TO_ID = dict(a=1)"},
        {proteins.VOCABULARY: "def"},
        {proteins.VOCABULARY: source, proteins.ALIGNMENT: "AG"},
        {proteins.VOCABULARY: source, proteins.ALIGNMENT: ">a\nAGW"},
        {proteins.VOCABULARY: source, proteins.ALIGNMENT: ""},
    ):
        damaged = commit_files(tmp_path / f"damaged{len(str(files))}", files)
        with pytest.raises(ValueError, match=r"utils\.py|example_msa") as error:
            proteins.read_proteins(damaged, proteins.read_vocabulary(damaged))
        assert_one_line(error)


@torch.no_grad()
def test_a_protein_model_equals_transformers(tmp_path):
    raw = {"d_model": 16, "n_layer": 2, "vocab_size": 11, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": False}
    raw |= {"fused_add_norm": True, "pad_vocab_size_multiple": 8}
    state = MambaLM(MambaLMConfig.from_dict(raw)).state_dict()
    state["lm_head.weight"] = state["backbone.embedding.weight"]
    clone = commit_files(
        tmp_path / "clone",
        {
            f"{proteins.MODEL}/config.json": json.dumps(raw),
            f"{proteins.MODEL}/pytorch_model.bin": saved(state),
            proteins.VOCABULARY: "AA_TO_ID = {'<cls>': 0, 'A': 5, 'G': 6}",
            proteins.ALIGNMENT: ">first\nAGGA\n",
        },
    )
    assert all(figure.agrees for figure in proteins.compare(clone, Options()))
    assert all(figure.agrees for figure in proteins.compare(clone, Options(dtype=torch.float64)))


# Captures


def captured_block(is_mimo):
    """Return the arrays of a capture, computed by the block that the kernels belong to."""
    block = Mamba3(16, d_state=8, headdim=8, is_mimo=is_mimo, mimo_rank=2)
    for weight in (
        block.B_bias,
        block.C_bias,
        block.D,
        *([block.mimo_x, block.mimo_z, block.mimo_o] if is_mimo else []),
    ):
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 5, 16)
    inputs, z = block.scan_inputs(x)
    projected = []
    block.out_proj.register_forward_pre_hook(lambda _, arguments: projected.append(arguments[0]))
    block(x)
    out = projected[0].unflatten(-1, (4, 8))
    share = (inputs.gamma / inputs.dt).logit()
    rank = (lambda v: v) if is_mimo else (lambda v: v.squeeze(2))
    head = (lambda v: v) if is_mimo else (lambda v: v.squeeze(1))
    arrays = {"Q": rank(inputs.q), "K": rank(inputs.k), "V": inputs.x, "Z": z, "D": inputs.D}
    arrays |= {name: getattr(inputs, field).transpose(1, 2) for name, field in (("ADT", "log_decay"), ("DT", "dt"))}
    arrays |= {"Trap": share.transpose(1, 2), "Q_bias": head(inputs.q_bias), "K_bias": head(inputs.k_bias)}
    arrays["Angles"] = (inputs.angular_rate / torch.pi).atanh().unsqueeze(2).expand(-1, -1, 4, -1)
    if is_mimo:
        arrays |= {"MIMO_V": block.mimo_x, "MIMO_Z": block.mimo_z, "MIMO_Out": block.mimo_o}
    return {"out": out.numpy(), **{f"kw_{name}": x.detach().numpy() for name, x in arrays.items()}}


@pytest.mark.parametrize("is_mimo", [False, True])
@torch.no_grad()
def test_a_capture_is_computed_like_the_block_it_comes_from(is_mimo):
    arrays = captured_block(is_mimo)
    output, captured = captures.run_capture("capture", arrays, torch.float64)
    assert torch.allclose(output.float(), captured, atol=1e-4, rtol=1e-4)
    assert captures.units(output, captured) <= 0.51  # the rounding of the output
    with pytest.raises(ValueError, match="capture: ") as error:
        captures.run_capture("capture", {name: x for name, x in arrays.items() if name != "kw_DT"}, torch.float64)
    assert_one_line(error, "kw_DT")


@torch.no_grad()
def test_captures_that_a_clone_lacks_are_named_and_not_counted(tmp_path):
    model = MambaLM(d_model=16, n_layer=1, vocab_size=8, ssm_cfg={"layer": "Mamba3", "d_state": 8, "headdim": 8})
    shapes = {name: list(x.shape) for name, x in model.named_parameters()}
    folder = captures.FOLDERS["siso"]
    readme = "| Reference vs the official kernel | **2.40 bf16 ULP** | 4.47 |"
    manifest = {"cases": [{"name": "here"}, {"name": "away"}], "model": "m", "device": "GPU"}
    clone = commit_files(
        tmp_path / "clone",
        {
            "README.md": readme,
            f"{folder}/manifest.json": json.dumps(manifest),
            f"{folder}/here.npz": archived(**captured_block(False)),
            f"{folder}/model_shape.json": json.dumps({"config": model.config.to_dict(), "parameters": shapes}),
        },
    )
    first, second = captures.compare_captures(clone, "siso", torch.float32)
    assert first.agrees
    assert first.published == "4.47"
    assert second.agrees is None
    assert "away" in second.criterion
    assert captures.compare_parameters(clone, "siso").agrees


# Kernels in the interpreter


def test_kernels_become_a_package_of_their_own_and_other_clones_are_rejected(tmp_path, monkeypatch):
    files = {f"{interpreted.PACKAGE}mamba3_siso_combined.py": "VALUE = 3", f"{interpreted.PACKAGE}__init__.py": ""}
    files |= {"mamba_ssm/__init__.py": "raise SystemExit", "setup.py": "raise SystemExit"}
    clone = commit_files(tmp_path / "clone", files)
    interpreted.extract_package(clone, tmp_path / "package")
    code = "from mamba_ssm.ops.triton.mamba3 import mamba3_siso_combined as m; assert m.VALUE == 3"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "package", check=True)
    with pytest.raises(ValueError, match=r"expected mamba3_siso_combined\.py") as error:
        interpreted.extract_package(commit_files(tmp_path / "other", {"file": ""}), tmp_path / "nothing")
    assert_one_line(error)
    monkeypatch.setattr(interpreted, "NEEDS", ("no_such_package",))
    (figure,) = interpreted.compare(clone, Options())
    assert figure.agrees is None
    assert "needs no_such_package" in figure.criterion


# The command


def test_the_command_says_which_clones_are_missing_and_fails_if_a_row_cannot_be_read(tmp_path, capsys, monkeypatch):
    clone = commit_files(tmp_path / "clones" / "prices", {"README.md": "no table"})
    monkeypatch.setattr(prices, "ROW", prices.Row(**{**vars(prices.ROW), "commit": clone.commit}))
    assert command.main([str(tmp_path / "clones"), "--only", "proteins"]) == 0
    out = capsys.readouterr().out
    assert "not run: no clone with this commit (git clone https://github.com/Bitbol-Lab/ProtMamba-ssm)" in out
    assert command.main([str(tmp_path / "clones"), "--only", "prices"]) == 1
    out = capsys.readouterr().out
    assert "failed: README.md: expected a row of three errors for CryptoMamba, found none" in out
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
