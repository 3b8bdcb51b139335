"""The cases of generation: whole models of the mamba2-130m and mamba3-187m shapes with random weights.

Mamba-2 is compared with transformers on the same weights; Mamba-3, which transformers lacks, with our Mamba-2.
"""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.core.weight_formats import FORMAT_SPECS, check_format
from anymamba.generation import decoder, prefill
from anymamba.models import MambaLM, MambaLMConfig
from anymamba.quantization import quantize_model
from benchmarks.harness import Call, Case, Contender, forward

MAMBA2_130M = MambaLMConfig(
    d_model=768, n_layer=24, vocab_size=50277, pad_vocab_size_multiple=16, ssm_cfg={"layer": "Mamba2"}
)
MAMBA3_SISO_187M = MambaLMConfig(
    d_model=768, n_layer=12, vocab_size=128256, d_intermediate=1536, ssm_cfg={"layer": "Mamba3"}
)
MAMBA3_MIMO_187M = dataclasses.replace(
    MAMBA3_SISO_187M, d_intermediate=1264, ssm_cfg={"layer": "Mamba3", "is_mimo": True, "mimo_rank": 4}
)
FAMILIES = {"mamba2-130m": MAMBA2_130M, "mamba3-siso-187m": MAMBA3_SISO_187M, "mamba3-mimo-187m": MAMBA3_MIMO_187M}
# A long prompt takes an hour through the whole model; two of its layers grow in the same way.
TWO_LAYERS = "mamba2-130m-two-layers"
CONFIGS = {**FAMILIES, TWO_LAYERS: dataclasses.replace(MAMBA2_130M, n_layer=2)}
LONG_PROMPT = 1_000_000
SHORT_PROMPT = 8192
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tiny(config: MambaLMConfig) -> MambaLMConfig:
    """Return the same model with one layer and few tokens."""
    return dataclasses.replace(config, n_layer=1, vocab_size=256, d_model=128)


@cache
def our_model(config: str, small: bool = False) -> MambaLM:
    """Return our model with random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MambaLM(tiny(CONFIGS[config]) if small else CONFIGS[config]).eval()


@cache
def our_model_in(dtype: str, small: bool = False) -> MambaLM:
    """Return mamba2-130m in another dtype."""
    model = MambaLM(tiny(MAMBA2_130M) if small else MAMBA2_130M, dtype=DTYPES[dtype]).eval()
    model.load_state_dict(our_model("mamba2-130m", small).state_dict())
    return model


@cache
def checkpoint(config: str, format: str, small: bool = False) -> tempfile.TemporaryDirectory[str]:
    """Save our model to a directory that lives as long as this process, and return it."""
    directory = tempfile.TemporaryDirectory()
    our_model(config, small).save_pretrained(directory.name, format=format)
    return directory


@cache
def transformers_model(config: str, small: bool = False) -> Any:
    """Return the model of transformers with the weights of ours, read from transformers' files."""
    directory = checkpoint(config, "transformers", small).name
    return import_module("transformers").Mamba2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def prompt(batch: int, t: int) -> Tensor:
    """Return random token ids (b, t)."""
    return torch.randint(256, (batch, t), generator=torch.Generator().manual_seed(2))


def set_up_prefill(config: str, library: str, batch: int, t: int, small: bool = False) -> Call:
    """Prefill a prompt, in segments for our model, and return the logits of the next token and a cache."""
    ids_bt = prompt(batch, t)
    if library == "transformers":
        theirs = transformers_model(config, small)
        return forward(lambda: {"logits": theirs(ids_bt, use_cache=True, logits_to_keep=1).logits[:, -1]})
    model = our_model(config, small)
    return forward(lambda: {"logits": prefill(model, ids_bt).logits})


MODULES = "anymamba, module by module"


def set_up_decode(config: str, library: str, batch: int, t: int, small: bool = False) -> Call:
    """Return a call that decodes one token per row; each call continues from the cache of the previous one."""
    ids_bt, ids_b = prompt(batch, t), prompt(batch, 1)[:, 0]
    if library == "transformers":
        theirs = transformers_model(config, small)
        with torch.no_grad():
            past = theirs(ids_bt, use_cache=True).cache_params

        def their_step() -> dict[str, Tensor]:
            out = theirs(ids_b.unsqueeze(1), cache_params=past, use_cache=True)
            return {"logits": out.logits[:, -1]}

        return forward(their_step)
    return set_up_steps(our_model(config, small), ids_bt, ids_b, by_modules=library == MODULES)


def set_up_steps(model: MambaLM, ids_bt: Tensor, ids_b: Tensor, by_modules: bool = False) -> Call:
    """Return a call that takes our steps after a prompt, as `generate` does or by the model's own modules."""
    with torch.no_grad():
        state = prefill(model, ids_bt).cache
    decode = decoder(model)

    def step() -> dict[str, Tensor]:
        nonlocal state
        if by_modules:
            logits, state = model.step(ids_b, state)
        else:
            logits, state = decode.step(ids_b, state, in_place=True)
        return {"logits": logits}

    return forward(step)


def set_up_decode_in(dtype: str, small: bool = False) -> Call:
    """Return a call that decodes with weights of another dtype, of which there are fewer bytes to read."""
    return set_up_steps(our_model_in(dtype, small), prompt(1, 64), prompt(1, 1)[:, 0])


IN_BFLOAT16 = ", computing in bfloat16"
WEIGHTS = ("float32", *FORMAT_SPECS, f"bfloat16{IN_BFLOAT16}")


@cache
def our_model_with(weights: str, small: bool = False) -> MambaLM:
    """Return mamba2-130m with quantized weights, computing in float32 unless the name ends otherwise."""
    model = our_model("mamba2-130m", small)
    if weights == "float32":
        return model
    format = weights.removesuffix(IN_BFLOAT16)
    quantized = quantize_model(copy.deepcopy(model), check_format("benchmark", format))
    return quantized if format == weights else quantized.to(torch.bfloat16)


def set_up_decode_with(weights: str, batch: int, small: bool = False) -> Call:
    """Return a call that decodes one token per row."""
    return set_up_steps(our_model_with(weights, small), prompt(batch, 64), prompt(batch, 1)[:, 0])


def set_up_prefill_with(weights: str, t: int, small: bool = False) -> Call:
    """Return a call that prefills a prompt."""
    model = our_model_with(weights, small)
    ids_1t = prompt(1, t)
    return forward(lambda: {"logits": prefill(model, ids_1t).logits})


FIRST_TOKEN = {
    "anymamba": """
import torch
from anymamba import MambaLM
model = MambaLM.from_pretrained({path!r})
print(model.generate(torch.tensor([{ids}]), 1).tokens.item())
""",
    "transformers": """
import torch
from transformers import Mamba2ForCausalLM
model = Mamba2ForCausalLM.from_pretrained({path!r}, dtype=torch.float32)
print(model.generate(torch.tensor([{ids}]), max_new_tokens=1, do_sample=False)[0, -1].item())
""",
}


def set_up_first_token(config: str, library: str, batch: int, t: int, small: bool = False) -> Call:
    """Return a call that starts a process and waits for its first token: imports, weights from disk, a prompt."""
    path = Path(checkpoint(config, "official" if library == "anymamba" else library, small).name)
    code = FIRST_TOKEN[library].format(path=str(path), ids=prompt(batch, t)[0].tolist())

    def run() -> dict[str, Tensor]:
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        return {"token": torch.tensor([float(out.split()[-1])])}

    return run


def set_up_long_prompt(config: str, tokens: int, small: bool = False) -> Call:
    """Return a call that prefills about a million tokens, as prompts of `tokens` each."""
    model = our_model(config, small)
    ids_1t = prompt(1, tokens)
    prompts = 1 if small else LONG_PROMPT // tokens

    def run() -> dict[str, Tensor]:
        for _ in range(prompts):
            logits = prefill(model, ids_1t).logits
        return {"logits": logits}

    return forward(run)


def set_up_reading(config: str, small: bool = False) -> Call:
    """Return a call that reads every weight once, as a sum over each parameter: the least that a token can cost."""
    parameters = list(our_model(config, small).parameters())
    return forward(lambda: {"sums": torch.stack([p.view(-1).sum() for p in parameters])})


def contender(name: str, set_up: Callable[..., Call], *arguments: Any, **options: Any) -> Contender:
    """Return the contender of one library on one workload."""
    config = arguments[0]
    return Contender(
        name=name,
        setup=partial(set_up, *arguments),
        tiny=partial(set_up, *arguments[:2], 1, 16, True) if len(arguments) > 2 else partial(set_up, config, True),
        **options,
    )


def against_transformers(name: str, set_up: Callable[..., Call], batch: int, t: int, *, read: bool = False) -> Case:
    """Return the cases of Mamba-2, ours and transformers', on the same weights."""
    config = "mamba2-130m"
    contenders = tuple(
        contender(library, set_up, config, library, batch, t, computes=name, library=library, heavy=t > 2048)
        for library in ("anymamba", "transformers")
    )
    if set_up is set_up_decode:
        contenders = (*contenders, contender(MODULES, set_up, config, MODULES, batch, t, computes=name))
    if read:
        contenders = (*contenders, contender("reading all weights once", set_up_reading, config, computes="reading"))
    return Case(name=f"generation/{name}", contenders=contenders, baseline="anymamba", tolerance=1e-4)


def by_family(name: str, set_up: Callable[..., Call], batch: int, t: int) -> Case:
    """Return the cases that compare the families."""
    contenders = tuple(contender(c, set_up, c, "anymamba", batch, t, computes=c) for c in FAMILIES)
    return Case(name=f"generation/{name}", contenders=contenders, baseline="mamba2-130m")


def by_dtype() -> Case:
    """Return the cases of one token of our model, with weights of each dtype."""
    contenders = tuple(contender(dtype, set_up_decode_in, dtype, computes=dtype) for dtype in DTYPES)
    return Case(name="generation/dtypes/decode/b1", contenders=contenders, baseline="float32")


def by_weights(name: str, set_up: Callable[..., Call], size: int) -> Case:
    """Return the cases that compare weight formats."""
    contenders = tuple(
        Contender(
            name=weights,
            setup=partial(set_up, weights, size),
            tiny=partial(set_up, weights, 1, small=True),
            computes=weights,
        )
        for weights in WEIGHTS
    )
    return Case(name=f"generation/weights/{name}", contenders=contenders, baseline="float32")


def first_token_case() -> Case:
    """Return the cases that start processes."""
    contenders = tuple(
        contender(
            library, set_up_first_token, "mamba2-130m", library, 1, 16, computes="token", library=library, heavy=True
        )
        for library in FIRST_TOKEN
    )
    return Case(name="generation/first-token", contenders=contenders, baseline="anymamba")


def long_prompt_case(config: str) -> Case:
    """Return the cases of a million tokens in one prompt and in many: a ratio of one means that time is linear."""
    contenders = tuple(
        Contender(
            name=f"prompts of {t}",
            setup=partial(set_up_long_prompt, config, t),
            tiny=partial(set_up_long_prompt, config, 64, True),
            computes=f"{t}",
            heavy=True,
        )
        for t in (SHORT_PROMPT, LONG_PROMPT)
    )
    name = f"generation/long-prompt/{config}"
    return Case(name=name, contenders=contenders, baseline=f"prompts of {SHORT_PROMPT}", on_request=True)


CASES: tuple[Case, ...] = (
    *(against_transformers(f"prefill/t{t}", set_up_prefill, 1, t) for t in (512, 2048, 8192)),
    against_transformers("decode/b1", set_up_decode, 1, 64, read=True),
    against_transformers("decode/b8", set_up_decode, 8, 64),
    by_family("families/prefill/t2048", set_up_prefill, 1, 2048),
    by_family("families/decode/b1", set_up_decode, 1, 64),
    by_family("families/decode/b8", set_up_decode, 8, 64),
    by_dtype(),
    by_weights("decode/b1", set_up_decode_with, 1),
    by_weights("decode/b8", set_up_decode_with, 8),
    by_weights("prefill/t2048", set_up_prefill_with, 2048),
    first_token_case(),
    long_prompt_case("mamba2-130m"),
    long_prompt_case(TWO_LAYERS),
)
