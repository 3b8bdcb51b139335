import dataclasses

import pytest

from anymamba.blocks import Block
from anymamba.core.config_fields import literal_choices
from anymamba.models.families import FAMILIES
from anymamba.training import TrainingConfig, read_config
from anymamba.training.config.sections import block_fields


def test_a_file_and_the_command_line_set_the_same_fields(tmp_path):
    (tmp_path / "c.toml").write_text(
        'seed = 3\n[optimizer]\nlr = 1\n[data]\nsources = ["a", "b"]\n[model]\nblock = { rope_fraction = 0.25 }\n'
    )
    from_file = read_config(tmp_path / "c.toml")
    overrides = {"seed": "3", "optimizer.lr": "1", "data.sources": "a,b", "model.block": "{rope_fraction = 0.25}"}
    assert from_file == read_config(None, overrides)
    assert from_file.optimizer.lr == 1.0
    assert from_file.model.lm_config(256).block_config().rope_fraction == 0.25


@pytest.mark.parametrize(
    "sources", [["a", "b"], "a,b", ["a,b"], '["a", "b"]', "['a','b']", ["a", '["b"]'], "a,b,"], ids=str
)
def test_a_list_is_understood_as_values_in_commas_or_in_brackets(sources):
    assert read_config(None, {"data.sources": sources}).data.sources == ("a", "b")


@pytest.mark.parametrize("name", ["a,b", "[1]", '["a"]', "[ab]*.txt", "x" * 300])
def test_an_entry_that_is_a_file_or_a_pattern_is_one_entry(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    if len(name) < 100 and "*" not in name:
        (tmp_path / name).write_text("x")
    assert read_config(None, {"data.sources": [name]}).data.sources == (name,)


def test_the_command_line_comes_last(tmp_path):
    (tmp_path / "c.toml").write_text("[batch]\ntokens = 512\n")
    assert read_config(tmp_path / "c.toml", {"batch.tokens": "1024"}).batch.tokens == 1024


def test_a_config_survives_its_tables():
    config = read_config(None, {"threads": "2", "data.mode": "stream", "model.tie_embeddings": "false"})
    assert TrainingConfig.from_dict(config.to_dict()) == config
    assert read_config(None, {"threads": "none"}).threads is None


def test_one_dial_sets_layers_width_and_heads():
    for depth in (1, 4, 12):
        config = read_config(None, {"model.depth": str(depth)}).model.lm_config(256)
        block = config.block_config()
        assert (config.n_layer, config.d_model, block.headdim, block.nheads) == (depth, 64 * depth, 64, 2 * depth)


def test_every_field_has_a_help():
    assert all(field.metadata["help"] for field in TrainingConfig.fields_by_name().values())


def test_only_fields_that_change_a_weight_count_as_changed():
    a = TrainingConfig()
    b = a.with_overrides({"evaluation.every": "7", "checkpoints.keep": "9", "seed": "1", "batch.tokens": "512"})
    assert a.changed_fields(b) == {"batch.tokens": (4096, 512), "seed": (0, 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimiser]\nlr = 1", "optimiser: no such field; did you mean optimizer?"),
        ("[optimizer]\nlearning_rate = 1", "optimizer.learning_rate: no such field"),
        ("lr = 1", "lr: no such field; did you mean optimizer.lr?"),
        ("sead = 1", "sead: no such field; did you mean seed?"),
        ('"optimizer.lr" = 1', "optimizer.lr: no such field; did you mean optimizer.lr?"),
        ("[data]\nsource = 'a'", "data.source: no such field; did you mean data.sources?"),
        ("[data]\ndepth = 3", "data.depth: no such field; did you mean model.depth?"),
        ("[schedule]\nwibble = 3", "no such field; known are schedule.steps, schedule.kind, schedule.warmup,"),
        ("[optimizer]\nlr = 'fast'", "optimizer.lr must be float, got 'fast'"),
        ("seed = true", "seed must be int, got True"),
        ("model = 3", "model must be a table, got 3"),
        ("[batch]\ntokens = 100\nlength = 64", "batch.tokens must be a multiple of length · accumulation = 64 · 1"),
        ("[schedule]\nsteps = 0", "schedule.steps must be at least 1, got 0"),
        ("[data]\nheld_out = 1.5", "data.held_out must be above 0 and below 1, got 1.5"),
        ("[data]\nsources = []", "data.sources must name some text, got none"),
        ("[data]\nsources = [1]", "data.sources must be a list of strings, got [1]"),
        ("[optimizer]\nbeta2 = 1.0", "optimizer.beta2 must be below 1, got 1.0"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be at least 0, got nan"),
        ("= 3", "not readable TOML"),
        ("x = " + "[" * 10**5, "not readable TOML (nested too deeply)"),
        ("seed = " + "9" * 5000, "not readable TOML"),
        ("[optimizer]\nlr = " + "9" * 400, "optimizer.lr must be float, got 999"),
        ("seed = " + "9" * 400, "seed must be at least 0 and below 2^63"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match="c\\.toml") as error:
        read_config(tmp_path / "c.toml")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("optimizer.l", "1", "--optimizer.l: no such field; did you mean optimizer.lr"),
        ("lr", "1", "optimizer.lr"),
        ("seed", "x", "--seed must be a number (int), got 'x'"),
        ("model.tie_embeddings", "yes", "--model.tie_embeddings must be true or false, got 'yes'"),
        ("model.block", "{", "--model.block must be a TOML value"),
        ("model.block", "[" * 10**5, "--model.block must be a TOML value"),
        ("seed", ["1", "2"], "--seed takes one value, got 1 2"),
    ],
)
def test_a_bad_override_says_what_is_wrong(name, text, message):
    with pytest.raises(ValueError, match=r"field|must|takes") as error:
        read_config(None, {name: text})
    assert message in str(error.value)


def test_a_field_of_the_block_is_not_misspelled_unnoticed():
    with pytest.raises(
        ValueError, match=r"model\.block\.rope_fractoin: no such field of Mamba3; did you mean rope_frac"
    ):
        read_config(None, {"model.block": "{rope_fractoin = 0.25}"}).model.lm_config(256)
    with pytest.raises(
        ValueError, match=r"model\.family must be one of Mamba1, Mamba2, Mamba3, Attention, got 'Mamba9'"
    ):
        read_config(None, {"model.family": "Mamba9"}).model.lm_config(256)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file"):
        read_config(tmp_path / "nowhere")


def test_the_values_that_a_field_allows_are_known():
    hints = TrainingConfig.hints()
    assert hints.keys() == TrainingConfig.fields_by_name().keys()
    assert literal_choices(hints["schedule.kind"]) == ("cosine", "wsd", "constant")
    assert literal_choices(hints["data.sources"]) == literal_choices(hints["seed"]) == ()


def test_mamba_1_has_channels_and_no_heads():
    block = read_config(None, {"model.family": "Mamba1"}).model.lm_config(256).block_config()
    assert (block.d_state, block.d_inner) == (16, 512)
    with pytest.raises(ValueError, match=r"model.headdim: Mamba1 has none, got 8"):
        read_config(None, {"model.family": "Mamba1", "model.headdim": "8"}).model.lm_config(256)


def test_overrides_may_be_values_or_texts():
    texts = {"schedule.steps": "6", "optimizer.lr": "0.001", "data.sources": ["a", "b"], "precision.compile": "true"}
    values = {"schedule.steps": 6, "optimizer.lr": 1e-3, "data.sources": ("a", "b"), "precision.compile": True}
    assert read_config(None, values) == read_config(None, texts)
    assert read_config(None, {"model.block": {"expand": 1}}).model.block == {"expand": 1}
    assert read_config(None, {"threads": None}).threads is None
    for name, value in {"schedule.steps": 6.5, "optimizer.lr": None, "data.sources": 3, "seed": True}.items():
        with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
            read_config(None, {name: value})


def test_default_sizes_fit_a_family_whose_inner_width_is_another(monkeypatch):
    """Heads divide the inner width, which is expand times the width for Mamba and may be the width elsewhere."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class HeadsConfig:
        d_model: int
        headdim: int = 64

    class Heads(Block):
        CONFIG = HeadsConfig

    monkeypatch.setitem(FAMILIES, "Heads", Heads)
    section = read_config(None, {"model.family": "Heads", "model.d_model": 96}).model
    assert block_fields(section, "Heads", 96, d_state=64, headdim=64) == {"layer": "Heads", "headdim": 32}
    small = read_config(None, {"model.block": {"expand": 1}}).model
    assert block_fields(small, "Mamba2", 32, d_state=64, headdim=64)["headdim"] == 32
    assert block_fields(section, "Mamba2", 32, d_state=64, headdim=64)["headdim"] == 64
