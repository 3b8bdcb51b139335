"""Configs are passed by position and by name, under our names and with a hint for those of others."""

import copy
import dataclasses
import pickle

import pytest

from anymamba import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config

FAMILIES = [(Mamba1, Mamba1Config), (Mamba2, Mamba2Config), (Mamba3, Mamba3Config)]


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_d_model_is_given_by_position_or_name(family, config):
    assert config(64) == config(d_model=64) == family(64).config == family(config(64)).config
    with pytest.raises(TypeError):
        config(64, 128)
    for copied in (copy.deepcopy(config(64)), pickle.loads(pickle.dumps(config(64)))):
        assert copied == config(64)
    assert dataclasses.replace(config(64), d_state=32) == config(64, d_state=32)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "config", "name", "ours"),
    [
        (Mamba2, Mamba2Config, "state_rank", "d_state"),
        (Mamba2, Mamba2Config, "conv_kernel", "d_conv"),
        (Mamba2, Mamba2Config, "per_head_dim", "headdim"),
        (Mamba2, Mamba2Config, "has_proj_bias", "bias"),
        (Mamba2, Mamba2Config, "has_conv_bias", "conv_bias"),
        (Mamba2, Mamba2Config, "a_init_range", "A_init_range"),
        (Mamba2, Mamba2Config, "is_norm_before_gate", "norm_before_gate"),
        (Mamba3, Mamba3Config, "has_learnable_init_state", "learnable_init_states"),
        (Mamba3, Mamba3Config, "has_outproj_norm", "is_outproj_norm"),
        (Mamba1, Mamba1Config, "hidden_size", "d_model"),
        (Mamba1, Mamba1Config, "time_step_rank", "dt_rank"),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(family, config, name, ours):
    for make in (family, config):
        with pytest.raises(TypeError, match=f"{config.__name__} has no field '{name}'; did you mean {ours}\\?"):
            make(64, **{name: 1})


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (Mamba2Config, "nheads", "there are expand · d_model / headdim heads, so give headdim"),
        (Mamba3Config, "num_heads", "there are expand · d_model / headdim heads, so give headdim"),
        (Mamba1Config, "d_inner", "it is expand · d_model, so give expand"),
    ],
)
def test_numbers_that_follow_from_others_are_answered_with_the_fields_to_set(config, name, hint):
    with pytest.raises(TypeError, match=f"{config.__name__} has no field '{name}': {hint}"):
        config(64, **{name: 4})


@pytest.mark.parametrize("config", [Mamba2Config, Mamba3Config])
def test_a_size_beyond_all_that_can_be_computed_is_rejected(config):
    assert config(64, chunk_size=2**31 - 1).chunk_size == 2**31 - 1
    with pytest.raises(ValueError, match=rf"chunk_size must be at most 2147483647, got {2**40}"):
        config(64, chunk_size=2**40)


def test_a_rank_without_mimo_warns_that_the_block_is_siso():
    for make in (Mamba3, Mamba3Config):
        with pytest.warns(UserWarning, match="mimo_rank = 2 is ignored without is_mimo=True: the block is SISO"):
            assert make(32, mimo_rank=2).rank == 1
        assert make(32, mimo_rank=2, is_mimo=False).rank == 1  # as official configs have it
        assert make(32, mimo_rank=2, is_mimo=True).rank == 2
