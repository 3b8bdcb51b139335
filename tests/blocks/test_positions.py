import inspect

import pytest

from anymamba import Mamba1, Mamba2, Mamba3

# The constructors of the official blocks, as far as our fields have their positions.
OFFICIAL = {
    Mamba1: "d_model d_state d_conv expand dt_rank dt_min dt_max dt_init dt_scale dt_init_floor conv_bias bias",
    Mamba2: "d_model d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim rmsnorm "
    "norm_before_gate dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size",
    Mamba3: "d_model d_state expand headdim ngroups rope_fraction dt_min dt_max dt_init_floor A_floor is_outproj_norm "
    "is_mimo mimo_rank",
}


@pytest.mark.parametrize("block", OFFICIAL, ids=lambda block: block.__name__)
def test_fields_have_the_positions_of_the_official_block(block):
    names = OFFICIAL[block].split()
    values = {"d_model": 64, "d_state": 16, "bias": True, "dt_min": 0.002, "dt_max": 0.2, "rope_fraction": 1.0}
    defaults = {name: p.default for name, p in inspect.signature(block.CONFIG).parameters.items()}
    chosen = [values.get(name, defaults[name]) for name in names]
    assert block(*chosen).config == block.CONFIG(**dict(zip(names, chosen, strict=True)))
    assert block(64, 16).config == block.CONFIG(d_model=64, d_state=16)
    with pytest.raises(TypeError, match=f"at most {len(names)} positions, got {len(names) + 1}; give those after"):
        block(*chosen, None)


def test_a_field_is_given_once():
    with pytest.raises(TypeError, match="d_state was given twice"):
        Mamba2(64, 16, d_state=16)
    with pytest.raises(TypeError, match="give a config or its fields, not both"):
        Mamba2(Mamba2.CONFIG(d_model=64), 16)
