"""Generation compared with llama.cpp: the mamba2-130m shape with the same random weights, in a GGUF file per format.

Its formats are compared with ours of the same number of bits. Their codes differ, and with them the logits, so only
those of float32 are compared. With weights in bfloat16 it rounds activations to bfloat16, as ours does when it computes
in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.generation import IN_BFLOAT16, our_model, prompt, set_up_decode_with, set_up_prefill_with
from benchmarks.harness import Call, Case, Contender

FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_CONTEXT = 16384  # total tokens of a context before it starts again
_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "backbone.embedding.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}
_AS_MATRIX = ("ssm_in.weight", "ssm_out.weight", "token_embd.weight")


@cache
def directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory for the files that lives as long as this process."""
    return tempfile.TemporaryDirectory()


@cache
def gguf_file(format: str, small: bool) -> Path:
    """Write our model as llama.cpp reads it, with arbitrary names of the tokens, and return the file."""
    gguf = import_module("gguf")
    model = our_model("mamba2-130m", small)
    config, block = model.config, model.config.block_config()
    path = Path(directory().name) / f"{format}-{small}.gguf"
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_context_length(_CONTEXT)
    writer.add_block_count(config.n_layer)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(block.d_conv)
    writer.add_ssm_inner_size(block.d_inner)
    writer.add_ssm_state_size(block.d_state)
    writer.add_ssm_time_step_rank(block.nheads)
    writer.add_ssm_group_count(block.ngroups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list([f"<{i}>" for i in range(config.padded_vocab_size)])
    writer.add_token_types([1] * config.padded_vocab_size)
    writer.add_token_merges(["< >"])
    writer.add_eos_token_id(0)
    kind = gguf.GGMLQuantizationType[format]
    for name, x in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        number, _, rest = name.removeprefix("backbone.layers.").partition(".")
        is_layer = ".layers." in name
        theirs = _NAMES[rest if is_layer else name]
        data = _theirs(theirs, x, block.ngroups).numpy()
        full = f"blk.{number}.{theirs}" if is_layer else theirs
        if theirs in _AS_MATRIX:
            writer.add_tensor(full, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(full, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _theirs(name: str, x: Tensor, groups: int) -> Tensor:
    """Convert a tensor to llama.cpp's form: A itself, no singleton axis in the convolution, one more in A and D."""
    if name == "ssm_a":
        return -torch.exp(x).unsqueeze(1)
    if name == "ssm_d":
        return x.unsqueeze(1)
    if name == "ssm_conv1d.weight":
        return x.squeeze(1)
    return x.reshape(groups, -1) if name == "ssm_norm.weight" else x


def llama(format: str, small: bool) -> Any:
    """Return llama.cpp's model, with as many threads as ours."""
    threads = torch.get_num_threads()
    return import_module("llama_cpp").Llama(
        str(gguf_file(format, small)),
        n_ctx=_CONTEXT,
        n_batch=2048,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )


def _logits(model: Any) -> dict[str, Tensor]:
    logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(1, model.n_vocab()))
    return {"logits": torch.from_numpy(logits).clone()}


def their_decode(format: str, small: bool = False) -> Call:
    """Return a call that decodes one token."""
    model, ids, token = llama(format, small), prompt(1, 64)[0].tolist(), prompt(1, 1)[0].tolist()
    model.eval(ids)

    def step() -> dict[str, Tensor]:
        if model.n_tokens + 1 >= _CONTEXT:
            _forget(model)
        model.eval(token)
        return _logits(model)

    return step


def their_prefill(format: str, t: int, small: bool = False) -> Call:
    """Return a call that prefills a prompt."""
    model, ids = llama(format, small), prompt(1, t)[0].tolist()

    def run() -> dict[str, Tensor]:
        _forget(model)
        model.eval(ids)
        return _logits(model)

    return run


def _forget(model: Any) -> None:
    model.reset()
    model._ctx.kv_cache_clear()


def side_by_side(name: str, ours: Callable[..., Call], theirs: Callable[..., Call]) -> Case:
    """Return the cases that compare each of our formats with its counterpart."""
    contenders: list[Contender] = []
    for weights, format in FORMATS.items():
        computing = [weights, f"{weights}{IN_BFLOAT16}"] if weights == "bfloat16" else [weights]
        for label, set_up, which, library in (
            *((name, ours, name, "anymamba") for name in computing),
            (f"llama.cpp {format}", theirs, format, "llama_cpp"),
        ):
            contender = Contender(
                name=label,
                setup=partial(set_up, which),
                tiny=partial(set_up, which, small=True),
                computes=weights if weights == "float32" else label,
                library=library,
            )
            contenders.append(contender)
    return Case(name=f"generation/llama/{name}", contenders=tuple(contenders), baseline="float32", tolerance=1e-3)


CASES: tuple[Case, ...] = (
    side_by_side("decode/b1", partial(set_up_decode_with, batch=1), their_decode),
    *(
        side_by_side(f"prefill/t{t}", partial(set_up_prefill_with, t=t), partial(their_prefill, t=t))
        for t in (512, 2048)
    ),
)
