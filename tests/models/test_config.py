import dataclasses
import pydoc

import pytest

from anymamba import MambaLM, MambaLMConfig
from tests.models.cases import FAMILIES, GOLDEN

SMALL = {"d_model": 32, "n_layer": 2, "ssm_cfg": FAMILIES["Mamba2"]}


def test_unknown_fields_are_kept_and_written_back():
    raw = {**SMALL, "vocab_size": 100, "trained_on": "everything"}
    config = MambaLMConfig.from_dict(raw)
    assert config.extra == {"trained_on": "everything"}
    assert raw.items() <= config.to_dict().items()
    assert MambaLMConfig.from_dict(config.to_dict()) == config


def test_vocabulary_and_mlp_width_are_rounded_up():
    config = MambaLMConfig(**SMALL, vocab_size=50277, pad_vocab_size_multiple=16, d_intermediate=1264)
    assert config.padded_vocab_size == 50288
    assert config.mlp_width == 1280
    assert MambaLMConfig(**SMALL, vocab_size=50288, pad_vocab_size_multiple=16).padded_vocab_size == 50288


def test_a_config_that_names_no_layer_is_of_mamba_1():
    """As state-spaces/mamba-130m's, which names nothing."""
    config = MambaLMConfig.from_dict({"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}})
    block = config.block_config()
    assert (config.layer, config.padded_vocab_size) == ("Mamba1", 50280)
    assert (block.d_inner, block.d_state, block.dt_width) == (1536, 16, 48)


def test_options_of_the_official_kernels_change_nothing():
    ssm_cfg = {**FAMILIES["Mamba2"], "use_mem_eff_path": False, "chunk_size": 256}
    config = MambaLMConfig(**{**SMALL, "ssm_cfg": ssm_cfg})
    assert config.block_config() == MambaLMConfig(**SMALL).block_config()
    assert config.to_dict()["ssm_cfg"] == ssm_cfg


def test_lists_of_a_json_file_become_tuples():
    config = MambaLMConfig(**{**SMALL, "ssm_cfg": {**FAMILIES["Mamba2"], "dt_limit": [0.0, 0.5]}})
    assert config.block_config().dt_limit == (0.0, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm_cfg": {"headdim": 8}}, r"Mamba1 does not know: \['headdim'\]"),
        ({"ssm_cfg": {"dt_rank": "some"}}, r'dt_rank"\] must be int or auto, got .some'),
        ({"ssm_cfg": {"dt_rank": 1.5}}, "must be int or auto, got 1.5"),
        ({"ssm_cfg": {"dt_init": "zero"}}, r'dt_init"\] must be one of random, constant, got .zero'),
        ({"ssm_cfg": {"layer": "Mamba9"}}, "must be one of .*'Mamba9'"),
        ({"ssm_cfg": {"layer": "mamba-3"}}, r"got 'mamba-3'; did you mean Mamba3"),
        ({"ssm_cfg": {"layer": "Mamba2", "heads": 3}}, r"does not know: \['heads'\]"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 7}}, "headdim must divide"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": "eight"}}, r'ssm_cfg\["headdim"\] must be int, got .eight'),
        ({"ssm_cfg": {"layer": "Mamba2", "d_state": 1.5}}, "must be int, got 1.5"),
        ({"ssm_cfg": {"layer": "Mamba2", "bias": 1}}, "must be bool, got 1"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0]}}, r"must be a list of 2 numbers, got \[0.0\]"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": True}}, "must be int or None, got True"),
        ({"ssm_cfg": {"layer": "Mamba3", "a_activation": 3}}, "must be one of heavy_tail, softplus, got 3"),
        ({"n_layer": 0}, "n_layer must be at least 1, got 0"),
        ({"n_layer": 2.0}, "n_layer must be int, got 2.0"),
        ({"rms_norm": "yes"}, "rms_norm must be bool, got 'yes'"),
        ({"d_intermediate": -1}, "d_intermediate must be 0 or a width, got -1"),
    ],
)
def test_invalid_configs_raise_by_name(change, message, unchecked):
    with pytest.raises(ValueError, match=message):
        MambaLMConfig(**{**SMALL, **change})


def test_the_config_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MambaLMConfig(**SMALL).d_model = 3


def test_a_table_that_the_caller_changes_later_is_not_the_configs():
    ssm_cfg, extra = dict(FAMILIES["Mamba2"]), {"notes": ["first"]}
    config = MambaLMConfig(d_model=32, n_layer=2, ssm_cfg=ssm_cfg, extra=extra)
    ssm_cfg["d_state"] = 64
    extra["notes"].append("second")
    assert config.block_config().d_state == FAMILIES["Mamba2"]["d_state"]
    assert config.extra == {"notes": ["first"]}


def test_golden_configs_survive_a_round_trip():
    from anymamba.core.io import read_json

    raw = read_json(GOLDEN / "lm_mamba2" / "config.json")
    assert MambaLMConfig.from_dict(raw).to_dict() == raw


class TestFieldsOfTheModel:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"layer": "Mamba3"}, r"layer is a field of the blocks: give ssm_cfg=\{'layer': 'Mamba3', ...\}"),
            ({"d_state": 16}, "d_state is a field of the blocks: give ssm_cfg"),
            ({"d_modl": 16}, "MambaLM has no field 'd_modl'; did you mean d_model"),
            ({"n_layers": 2}, "MambaLM has no field 'n_layers'; did you mean n_layer"),
            ({"color": 2}, "MambaLM has no field 'color'$"),
        ],
    )
    def test_a_misspelled_one_is_met_with_the_one_that_was_meant(self, fields, message):
        with pytest.raises(TypeError, match=message):
            MambaLM(**fields)

    def test_a_misspelled_one_of_a_block_too(self):
        with pytest.raises(ValueError, match=r"does not know: \['d_stat'\]; did you mean d_state"):
            MambaLM(d_model=16, n_layer=1, vocab_size=8, ssm_cfg={"layer": "Mamba3", "d_stat": 8})

    def test_help_lists_them_with_their_defaults(self):
        text = pydoc.render_doc(MambaLM, renderer=pydoc.plaintext)
        for field in dataclasses.fields(MambaLMConfig):
            assert f"{field.name}: " in text
            if isinstance(field.default, int) and field.name != "fused_add_norm":
                line = next(line for line in text.splitlines() if f" {field.name}: " in line)
                assert str(field.default) in line
