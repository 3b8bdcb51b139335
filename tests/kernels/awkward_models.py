"""Models of awkward sizes in every weight format, for the sanitizers: `make asan` runs it on a build with them.

Whatever the sizes, a row of a compiled step has the same bits alone and in a batch, and a window those of its steps.

    python -m tests.kernels.awkward_models --seconds 60 --seed 1
"""

import argparse
import random
import tempfile
import time
import warnings
from collections import Counter

import torch

from anymamba import MambaLM, decoder, generate
from anymamba.core.weight_formats import FORMAT_SPECS
from anymamba.kernels import describe_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def draw_fields(chance):
    """Draw the arguments of a model; not all of them fit together."""
    layer = chance.choice(["Mamba1", "Mamba2", "Mamba3"])
    block = {"layer": layer, "d_state": chance.choice([1, 2, 3, 7, 8, 16, 21, 32, 65, 128])}
    if layer == "Mamba1":
        block |= {"dt_rank": chance.choice(["auto", 1, 3, 7]), "d_conv": chance.choice([2, 3, 4])}
    else:
        block |= {"headdim": chance.choice([1, 2, 3, 5, 8, 16, 17, 64]), "expand": chance.choice([1, 2, 3])}
        block["ngroups"] = chance.choice([1, 1, 2, 3])
    if layer == "Mamba2":
        block["d_conv"] = chance.choice([1, 2, 3, 4])
    if layer == "Mamba3":
        block |= {
            "rotation": chance.choice(["complex", "quaternion", "fixed"]),
            "rope_fraction": chance.choice([0.5, 1]),
        }
        block |= {"is_mimo": True, "mimo_rank": chance.choice([1, 2, 3, 5])} if chance.random() < 0.4 else {}
    return {
        "d_model": chance.choice([1, 2, 3, 5, 8, 17, 31, 33, 64, 96, 130]),
        "n_layer": chance.choice([1, 2]),
        "vocab_size": chance.choice([1, 2, 3, 17, 61, 300]),
        "pad_vocab_size_multiple": chance.choice([1, 8]),
        "tie_embeddings": chance.random() < 0.5,
        "d_intermediate": chance.choice([0, 0, 1, 7, 96]),
        "ssm_cfg": block,
    }


def draw_model(chance):
    """Draw a model; return its weight format and it, or None if the sizes do not fit together."""
    format = chance.choice([None, *FORMAT_SPECS])
    try:
        model = MambaLM(**draw_fields(chance), dtype=chance.choice(DTYPES))
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            return format, MambaLM.from_pretrained(directory, weights=format)
    except ValueError:
        return None


@torch.no_grad()
def check_steps(chance, model):
    """Step several rows, and compare bits with a row alone and with a window."""
    step, vocab_size = decoder(model), model.config.vocab_size
    rows, steps = chance.choice([1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 65, 67]), chance.choice([1, 2, 3, 5])
    ids, row = torch.randint(vocab_size, (rows, steps)), chance.randrange(rows)
    cache = alone = None
    logits = []
    for t in range(steps):
        together, cache = step.step(ids[:, t], cache)
        logits_alone, alone = step.step(ids[row : row + 1, t], alone)
        logits.append(together)
        if step.reason == "":
            assert torch.equal(together[row : row + 1], logits_alone), f"row {row} of {rows}"
    if step.window_reason == "":
        window = step.step_window(ids).logits
        assert torch.equal(window, torch.stack(logits, 1)), f"a window of {steps} tokens in {rows} rows"


def check_sequences(chance, model):
    """Read sequences, generate from them, and where weights can be trained, compute gradients."""
    shape = (chance.choice([1, 2]), chance.choice([1, 2, 3, 17, 64, 65, 130]))
    ids = torch.randint(model.config.vocab_size, shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    logits = model(ids).logits
    if parameters and logits.dtype != torch.float16:
        logits.float().square().mean().backward()
    generate(model, ids[:, :9], max_new_tokens=3)


def main(seconds, seed):
    """Draw models until the time is over."""
    warnings.simplefilter("ignore")
    kernels = describe_kernels()["cpu"]
    assert kernels.startswith("built"), f"expected kernels, got {kernels}"
    chance, counts, until = random.Random(seed), Counter(), time.monotonic() + seconds
    torch.manual_seed(seed)
    while time.monotonic() < until:
        if (drawn := draw_model(chance)) is None:
            continue
        format, model = drawn
        torch.set_num_threads(chance.choice([1, 2, 3, 4]))
        check_steps(chance, model)
        check_sequences(chance, model)
        counts[format or "plain"] += 1
    print(f"seed {seed}, kernels {kernels}: {dict(counts)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    main(options.seconds, random.randrange(10**6) if options.seed is None else options.seed)
