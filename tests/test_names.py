"""Every row of the tables of docs/names.md computes: the code of its second column runs, and does what the row says."""

import ast
import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F

import anymamba
from anymamba import Mamba1, Mamba2, Mamba3, MambaLM, SsdPath
from anymamba.models.families import FAMILIES
from anymamba.scan import scan
from anymamba.scan.chunking import ChunkLayout
from anymamba.scan.serial import chunk_cumsum, chunk_outputs, chunk_scores, chunk_states, pass_states
from anymamba.training import OptimizerSection
from anymamba.training.optim.optimizer import plan
from tests.documents import ROOT
from tests.support import assert_near

SECTIONS = (ROOT / "docs/names.md").read_text(encoding="utf-8").split("\n## ")[1:]
D = torch.float64


def rows(title):
    """Return the cells of a section's table, row by row."""
    (text,) = (section for section in SECTIONS if section.startswith(f"{title}\n"))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def spans(cell):
    """Return the code of a cell."""
    return re.findall(r"`([^`]+)`", cell)


# Sizes and options: a value that differs from the default, and the families that have the field.
SMALL = {"d_model": 32, "d_state": 16, "headdim": 16}
VALUES = {
    "d_model": 64,
    "d_state": 8,
    "d_conv": 2,
    "expand": 1.5,
    "headdim": 8,
    "nheads": 4,
    "ngroups": 2,
    "dt_rank": 5,
    "mimo_rank": 3,
    "A_init_range": (2, 3),
    "norm_before_gate": True,
    "bias": True,
    "conv_bias": False,
    "learnable_init_states": True,
    "is_outproj_norm": True,
    "dt_limit": (0.01, 0.02),
    "rope_fraction": 1.0,
    "rotation_range": 2.0,
}


def make(family, **fields):
    sizes = {name: value for name, value in SMALL.items() if family is not Mamba1 or name != "headdim"}
    return family(**{**sizes, **fields})


@pytest.mark.parametrize("row", rows("Sizes and options"), ids=lambda row: row[0])
def test_a_size_or_option_changes_a_block(row):
    name, _, value = spans(row[1])[0].partition("=")
    families = [family for family, bare in BARE.items() if hasattr(family.CONFIG(32, **bare), name)]
    assert families
    for family in families:
        options = {name: ast.literal_eval(value) if value else VALUES[name]} if name != "nheads" else {"headdim": 16}
        if name == "mimo_rank":
            options["is_mimo"] = True
        block = make(family, **options)
        assert getattr(block.config, name) == (options | {"nheads": 4})[name]
        x = torch.randn(2, 3, block.d_model)
        assert block(x).isfinite().all()
        assert block.prefill(x)[0].shape == x.shape
        if value or name == "nheads":
            continue
        plain = family.CONFIG(32, **BARE[family])
        assert options[name] != getattr(plain, name) or name in SMALL


BARE = {Mamba1: {}, Mamba2: {"headdim": 16}, Mamba3: {"headdim": 16}}


def test_names_of_burn_are_hinted_at():
    for burn, ours, _ in rows("Sizes and options"):
        names, (name, *_) = spans(burn), spans(ours)
        if not names or names[0] == name or not re.fullmatch(r"[a-z_]+", names[0]):
            continue
        family = next(f for f in FAMILIES.values() if name in {field.name for field in dataclasses.fields(f.CONFIG)})
        with pytest.raises(TypeError, match=f"did you mean {name}"):
            family.CONFIG(32, **{names[0]: 1})


def test_the_epsilon_of_norms_makes_the_difference_that_the_page_names():
    text = (ROOT / "docs/names.md").read_text(encoding="utf-8")
    epsilon = float(re.search(r"`block.norm.eps = (\S+)`", text)[1])
    torch.manual_seed(0)
    block, x = Mamba2(256), torch.randn(2, 64, 256)
    with torch.no_grad():
        ours = block(x)
        block.norm.eps = epsilon
        difference = (block(x) - ours).abs().max() / ours.abs().max()
    assert 1e-4 < difference < 1e-2


@pytest.mark.parametrize("row", rows("Parameters"), ids=lambda row: row[0])
def test_a_parameter_has_its_shape_and_takes_part(row):
    burn, name, shape = row[0], spans(row[1])[0], row[2].partition(":")[0]
    if "Mamba-1" in burn:
        block = make(Mamba1)
    elif (hasattr(Mamba2(32, headdim=16), name.partition(".")[0]) and "Mamba-3" not in burn) or name.startswith(
        "init_states"
    ):
        block = make(Mamba2, learnable_init_states=True)
    else:
        block = make(Mamba3, is_mimo=True, mimo_rank=2, is_outproj_norm="norm" in name)
    parameter = block.get_parameter(name)
    c = block.config
    letters = {"d": 32, "i": c.d_inner, "n": c.d_state, "w": getattr(c, "d_conv", 0)}
    letters |= {"h": getattr(c, "nheads", 0), "p": block.headdim, "r": getattr(c, "rank", 1)}
    letters |= {"v": getattr(c, "conv_dim", c.d_inner), "dt_rank": getattr(block, "dt_rank", 0)}
    letters |= {"inputs": 32, "outputs": parameter.shape[0]}
    products = re.sub(r"\b(in|out)\b", r"\1puts", shape.strip("()")).replace("·", "*").split(",")
    sizes = [eval(product, {}, letters) for product in products]
    assert list(parameter.shape) == sizes
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        before = block(x)
        parameter += 0.5 * torch.rand_like(parameter)
        assert not torch.equal(block(x), before)


class Names(dict):
    """What the code of a page may name: tensors and objects of one section, and all that is public."""

    def __missing__(self, name):
        return getattr(anymamba, name)


def evaluate(code, names):
    return eval(compile(code, code, "eval"), {"__builtins__": {}}, names)


def run_row(row, names):
    """Evaluate the code of a row that is an expression or an assignment; return the results."""
    results = []
    for code in spans(row[1]):
        tree = ast.parse(code).body[0] if not code.endswith("=") and not code.startswith(".") else None
        if isinstance(tree, ast.Assign):
            code = code.split(" = ", 1)[1] if " = " in code else code.split("=", 1)[1]
        if tree is not None:
            results.append(evaluate(code, names))
    return results


ALGORITHM_NAMES = Names(path=SsdPath.minimal(), block=Mamba3(32, headdim=16, is_mimo=True, mimo_rank=2))


@pytest.mark.parametrize("row", rows("Algorithms"), ids=lambda row: row[0])
def test_an_algorithm_is_a_path_that_scans(row):
    inputs = scan_names()
    expected = scan(*(inputs[name] for name in ("v", "k", "q", "log_decay")), path=SsdPath.recurrent())
    for result in run_row(row, ALGORITHM_NAMES):
        if isinstance(result, SsdPath):
            y, state = scan(*(inputs[name] for name in ("v", "k", "q", "log_decay")), path=result)
            assert_near(y, expected[0], 1e-10)
            assert_near(state, expected[1], 1e-10)
        else:
            assert result in (96, None)
    if "Recalculated(None)" in row[0]:
        assert run_row(row, ALGORITHM_NAMES) == [SsdPath("serial_recalculated")]


def scan_names(b=2, t=12, h=4, p=3, g=2, n=5):
    """Return the tensors of a scan, flat and in chunks of four."""
    torch.manual_seed(0)
    v, k, q = torch.randn(b, t, 1, h, p, dtype=D), *torch.randn(2, b, t, 1, g, n, dtype=D)
    log_decay, gamma, kappa, dt = torch.rand(4, b, t, h, dtype=D)
    state = torch.randn(b, h, p, n, dtype=D)
    layout = ChunkLayout(t, 4, None)
    names = {"v": v, "k": k, "q": q, "log_decay": -log_decay, "gamma": gamma, "kappa": kappa, "state": state, "F": F}
    names |= {"x": v.squeeze(2), "B": k.squeeze(2), "C": q.squeeze(2), "dt": dt, "D": torch.randn(h, dtype=D)}
    names |= {"A_log": torch.rand(h, dtype=D), "path": SsdPath.minimal(4), "scan": scan, "layout": layout}
    names["A"] = -names["A_log"].exp()
    names |= {f.__name__: f for f in (chunk_cumsum, chunk_outputs, chunk_scores, chunk_states, pass_states)}
    names["v_bcihp"] = layout.split(v).flatten(2, 3)
    for name in ("k", "q"):
        names[f"{name}_bcgin"] = layout.split(names[name]).flatten(2, 3).transpose(2, 3)
    names["log_decay_bclh"] = layout.split(-log_decay)
    names["lam_bchl"], names["total_bch"] = chunk_cumsum(names["log_decay_bclh"])
    names["scores_bcgii"] = chunk_scores(names["q_bcgin"], names["k_bcgin"])
    names["added_bchpn"] = chunk_states(names["v_bcihp"], names["k_bcgin"], names["lam_bchl"], names["total_bch"])
    names["entering_bchpn"], _ = pass_states(names["added_bchpn"], names["total_bch"], state, layout)
    return Names(names)


def recurrence(v, k, q, log_decay, gamma, kappa, state, before=None):
    """Compute the trapezoid step by step, for one rank."""
    heads = v.shape[3] // k.shape[3]
    k, q = (x.squeeze(2).repeat_interleave(heads, dim=2) for x in (k, q))
    v, ys = v.squeeze(2), []
    before = torch.zeros_like(state) if before is None else before
    for t in range(v.shape[1]):
        now = v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(2)
        alpha, new, old = (x[:, t, :, None, None] for x in (log_decay.exp(), gamma, kappa))
        state, before = alpha * (state + old * before) + new * now, now
        ys.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, 1).unsqueeze(2), state


def test_the_rows_of_scans_compute_what_they_say():
    n = scan_names()
    v, k, q, log_decay, gamma, kappa, state = (
        n[name] for name in ("v", "k", "q", "log_decay", "gamma", "kappa", "state")
    )
    table = {row[0]: row for row in rows("Scans")}
    results = {burn: run_row(row, n) for burn, row in table.items()}
    assert all(results.values())
    zeros, ones = torch.zeros_like(state), torch.ones_like(gamma)

    def check(burn, expected):
        for actual, reference in zip(results[burn][0], expected, strict=True):
            assert_near(actual, reference, 1e-10, burn)

    # Mamba-2's scan, and the one that burn-mamba's double pathway runs twice.
    dt, x, rates, skip = n["dt"], n["x"], n["A"], n["D"]
    y, final = recurrence(v * dt[:, :, None, :, None], k, q, dt * rates, ones, 0 * ones, state)
    check("`path.run(input)` with `Mamba2SsdInput`", (y.squeeze(2) + skip.unsqueeze(-1) * x, final))
    plain = recurrence(v, k, q, log_decay, ones, 0 * ones, state)
    check("`run` with `Mamba3DoubleSsdInput`", plain)
    both = recurrence(v, k, q, log_decay, gamma, kappa, zeros)
    check("both runs together", both)
    check("`run` with `Mamba3SingleSsdInput`", both)
    previous = (v[:, -1].squeeze(1).unsqueeze(-1)) * k[:, -1].squeeze(1).repeat_interleave(2, dim=1).unsqueeze(2)
    check("the boundary seed in `initial_state_bhpr`", recurrence(v, k, q, log_decay, gamma, kappa, state, previous))
    # The merged weights leave the same final state.
    (scale,) = (result for result in results["`scale_bnlh`"] if isinstance(result, torch.Tensor))
    assert_near(scan(v * scale[:, :, None, :, None], k, q, log_decay)[1], both[1], 1e-10)
    assert torch.equal(results["`a_decay_h`"][0], rates)
    assert results["`Mamba2SsdInput::x_bnlhp`"][0].shape == (2, 48, 3)
    assert results["`Mamba2SsdInput::x_bnlhp`"][1].shape == (2, 3, 4, 1, 4, 3)
    # The five stages make up the scan.
    finals = results["`k4_ssd_state_passing`"][0][1]
    outputs = n["layout"].join(results["`k5_ssd_chunk_scan`"][0].unflatten(2, (4, 1)))
    assert_near(outputs, plain[0], 1e-10)
    assert_near(finals, plain[1], 1e-10)


def block_names():
    torch.manual_seed(0)
    config = anymamba.Mamba2Config(32, d_state=16, headdim=16)
    block, x = Mamba2(config), torch.randn(2, 13, 32)
    cache = block.prefill(x)[1]
    ssm_cfg = {"layer": "Mamba2", "d_state": 8, "headdim": 16}
    stack_cfg = {"d_model": 32, "n_layer": 2, "ssm_cfg": ssm_cfg}
    model = MambaLM(d_model=32, n_layer=2, vocab_size=50, ssm_cfg=ssm_cfg)
    names = {"block": block, "config": config, "x": x, "x_t": x[:, 0], "cache": cache, "conv": cache.conv}
    names |= {"ssm": cache.ssm, "path": SsdPath.minimal(4), "device": "cpu", "anymamba": anymamba, "torch": torch}
    names |= {"ssm_cfg": ssm_cfg, "stack_cfg": stack_cfg, "model": model, "ids": torch.randint(50, (2, 6))}
    names |= {"stack": anymamba.Stack(**stack_cfg), "plan": plan, "OptimizerSection": OptimizerSection}
    names["tokens"] = anymamba.Stack(**stack_cfg, class_tokens=["start", "middle", "end"])
    return Names(names)


@pytest.mark.parametrize("row", rows("Calls and caches"), ids=lambda row: row[0])
def test_a_call_runs(row):
    names = block_names()
    block, x, cache = names["block"], names["x"], names["cache"]
    results = run_row(row, names)
    assert results
    if "prefill" in row[1]:
        y, new = results[0]
        expected, _ = block.prefill(torch.cat([x, x], 1))
        assert_near(y, expected[:, 13:], 5e-6)
        assert type(new) is type(cache)
    elif "block.step(" in row[1]:
        expected, _ = block.prefill(torch.cat([x, x[:, :1]], 1))
        assert_near(results[0][0], expected[:, -1], 5e-6)
    elif "step_infinite" in row[1]:
        expected = block(x[:, :1].expand(-1, 2000, -1))[:, -1]
        assert_near(results[0], expected, 1e-3)


def network_checks():
    """Return checks of the networks of some rows, by their name in burn-mamba."""
    return {
        "`Schedule::Cyclic`, with `n_virtual_layers`": lambda s: s.config.layer_order() == [0, 1, 0, 1, 0],
        "`Schedule::Stretched`": lambda s: s.config.layer_order() == [0, 0, 0, 1, 1],
        "`Schedule::Custom`": lambda s: s.config.layer_order() == [0, 1, 1, 0],
        "`ClassLatent::{Start, Middle, End, Custom(3)}` of a stack": lambda s: s(torch.randn(2, 13, 32)).shape[1] == 17,
        "`ClassLatent` of a layer": lambda s: s(torch.randn(2, 13, 32)).shape[1] == 14,
        "`ClassToken` of a network": lambda s: s(torch.randn(2, 13, 3)).shape[1] == 14,
        "`class_latent_output_indices(13)`": lambda indices: list(indices) == [0, 7, 15],
        "`MuonPlan`, `muon_plan()`": lambda rows: {row.owner for row in rows} == {"Muon", "AdamW"},
        '`without_segment("z")`': lambda rows: {row.owner for row in rows if "[z]" in row.name} == {"AdamW"},
    }


@pytest.mark.parametrize("row", rows("Networks"), ids=lambda row: row[0])
def test_a_network_computes(row):
    names = block_names()
    (result, *_) = run_row(row, names)
    x, ids = names["x"], names["ids"]
    if isinstance(result, anymamba.MambaLM):
        assert result(ids).logits.isfinite().all()
    elif isinstance(result, anymamba.LatentModel):
        assert result(torch.randn(2, 13, 3)).isfinite().all()
    elif isinstance(result, torch.nn.Module):
        result(x).sum().backward()
        assert any(p.grad is not None for p in result.parameters())
    elif "prefill" in row[1]:
        assert result[0].shape == (2, 16, 32)
    if row[0] in network_checks():
        assert network_checks()[row[0]](result)


NETWORK_FIELDS = {
    "n_real_layers": "n_layer",
    "n_virtual_layers": "n_virtual",
    "mamba_block": "ssm_cfg",
    "class_latents": "class_tokens",
    "n_stream": "streams",
    "residuals": "streams",
    "init_bias": "gate_bias",
    "init_bias_step": "gate_bias_step",
    "per_virtual_layer": "gates_per",
    "output_merge": "merge",
    "missing_lm_head": "tie_embeddings",
}


def test_names_of_network_fields_are_hinted_at():
    (text,) = re.findall(r"names of fields raise an error with ours: (.*?)\. `plan`", "".join(SECTIONS), re.DOTALL)
    assert spans(text) == list(NETWORK_FIELDS)
    for burn, ours in NETWORK_FIELDS.items():
        if burn != "missing_lm_head":
            kind = anymamba.BidirectionalStack if burn == "output_merge" else anymamba.Stack
            with pytest.raises(ValueError, match=f"got \\['{burn}'\\]; did you mean {ours}\\?"):
                kind(d_model=32, n_layer=2, **{burn: 1})
    for burn in ("n_real_layers", "mamba_block", "missing_lm_head"):
        with pytest.raises(TypeError, match=f"no field '{burn}'; did you mean {NETWORK_FIELDS[burn]}\\?"):
            MambaLM(d_model=32, **{burn: 1})
    with pytest.raises(TypeError, match=r"n_virtual_layers is a field of the stack: give stack=\{'n_virtual': 5"):
        MambaLM(d_model=32, n_virtual_layers=5)
    with pytest.raises(TypeError, match=r"state_rank is a field of the blocks: give ssm_cfg=\{'d_state': 16"):
        MambaLM(d_model=32, state_rank=16)
    with pytest.raises(ValueError, match=r"got \['n_virtual_layers'\]; did you mean n_virtual\?"):
        MambaLM(d_model=32, stack={"n_virtual_layers": 5})
    with pytest.raises(ValueError, match=r"does not know: \['state_rank'\]; did you mean d_state\?"):
        MambaLM(d_model=32, ssm_cfg={"layer": "Mamba2", "state_rank": 16})


def test_the_checks_of_networks_are_of_rows_that_exist():
    assert set(network_checks()) <= {row[0] for row in rows("Networks")}


def official_names(tmp_path):
    names = block_names()
    model = names["model"]
    names["name"] = tmp_path / "model"
    model.save_pretrained(names["name"])
    names |= {"config": model.config, "seq_idx": torch.tensor([[0] * 6 + [1] * 7] * 2)}
    names |= {"cu_seqlens": torch.tensor([0, 6, 13]), "u": torch.randn(2, 7, 4), "delta": torch.randn(2, 7, 4)}
    names |= {
        "A_in": -torch.rand(4, 3),
        "B_n": torch.randn(2, 7, 3),
        "C_n": torch.randn(2, 7, 3),
        "D_i": torch.randn(4),
    }
    names |= {"z": torch.randn(2, 7, 4), "x_heads": torch.randn(2, 7, 4, 3), "dt": torch.rand(2, 7, 4)}
    names |= {"A": -torch.rand(4), "B": torch.randn(2, 7, 2, 5), "C": torch.randn(2, 7, 2, 5), "D": torch.randn(4)}
    names |= {"causal_conv": anymamba.ops.causal_conv, "window": torch.zeros(2, 32, 4)}
    names |= {"weight": torch.randn(32, 4), "bias": torch.randn(32)}
    return names


@pytest.mark.parametrize("row", rows("The official package's calls"), ids=lambda row: row[0])
def test_an_official_call_has_its_counterpart(row, tmp_path):
    names = official_names(tmp_path)
    results = run_row(row, names)
    assert results or row[1] == "not needed"
    for result in results:
        tensors = result if isinstance(result, tuple) else (result,)
        assert all(x.isfinite().all() for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point())
    if "cu_seqlens" in row[1]:
        block, x = names["block"], names["x"]
        assert_near(results[0][:, 6:], block(x[:1, 6:]), 5e-6)
    elif "labels=" in row[1]:
        output = names["model"](names["ids"], labels=names["ids"])
        assert math.isfinite(output.loss.item())
    elif "generate" in row[1]:
        assert results[0].tokens.shape == (2, 4)


def test_every_table_is_run():
    tables = {section.partition("\n")[0] for section in SECTIONS if "\n| " in section}
    run = {"Sizes and options", "Parameters", "Algorithms", "Scans", "Calls and caches", "Networks"}
    assert tables == run | {"The official package's calls", "Letters"}


@pytest.mark.parametrize(
    "code", ["SsdPath.quick()", "anymamba.nothing()", "block.prefill(x, None, chunks=3)", "nothing"]
)
def test_code_that_does_not_run_is_noticed(code):
    with pytest.raises((AttributeError, TypeError)):
        evaluate(code, block_names())
