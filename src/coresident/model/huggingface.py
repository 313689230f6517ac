"""Models as directories of transformers: ours written so that it loads them, and Llama and OLMoE read as ours."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coresident import whole
from coresident.errors import MachineError, UserError
from coresident.model.attention import AttentionKernel
from coresident.model.huggingface_config import config_of, shape_of
from coresident.model.huggingface_weights import parts
from coresident.model.llama import Llama

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_AGAIN = "copy the directory again from its source"


def export(model: Llama, tokenizer_dir: Path | None, out: Path) -> None:
    """Write `out`: config.json, generation_config.json, model.safetensors in float32, and the tokenizer's files.

    It appears whole or not at all. Raises UserError where `out` exists, transformers has no such model, or the
    tokenizer has more tokens than the model; MachineError where it cannot be written.
    """
    shape = model.shape
    config = config_of(shape)
    tokens = _special(tokenizer_dir, shape.vocabulary) if tokenizer_dir else _NO_TOKENS
    if out.exists():
        raise UserError(f"{out} is already there", "remove it, or export to another directory")
    state = dict(model.named_parameters())
    stored = {
        part.theirs: part.of(state[part.ours].detach()).to("cpu", torch.float32).clone()
        for part in parts(shape)
    }
    aside = out.parent / f".{out.name}.aside-{os.getpid()}"
    _clear(out)
    try:
        aside.mkdir(parents=True)
        save_file(stored, aside / WEIGHTS, metadata={"format": "pt"})
        _write_json(aside / CONFIG, config | tokens)
        _write_json(aside / "generation_config.json", {"do_sample": False, **tokens})
        for name in _TOKENIZER if tokenizer_dir else ():
            if tokenizer_dir and (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, aside / name)
        # safetensors lets only the owner read what it writes.
        (aside / WEIGHTS).chmod((aside / CONFIG).stat().st_mode)
        for written in (*aside.iterdir(), aside):
            whole.sync(written)
        aside.rename(out)
        whole.sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"the model cannot be written to {out}: {error}",
            "free space or permissions there, or choose another place",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(path: Path, attention: AttentionKernel = "auto") -> Llama:
    """The model in a Llama's or OLMoE's directory, on the CPU in float32, in one file or in shards.

    Raises UserError where it is not such a directory, computes what we do not, or lacks, adds or misshapes a tensor.
    """
    model = Llama(shape_of(_read_json(path / CONFIG), str(path / CONFIG)), attention)
    state = dict(model.named_parameters())
    wanted = {part.theirs: part.of(state[part.ours].detach()) for part in parts(model.shape)}
    unmet = set(wanted)
    for file, name, tensor in _tensors(path):
        # Old Llamas carry a table that follows from the config; a tied output may be there twice.
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.shape.tied):
            continue
        into = wanted.get(name)
        if into is None:
            raise UserError(
                f"{file}: its tensor {name} has no place in the model that {CONFIG} describes", _AGAIN
            )
        if tensor.shape != into.shape or not tensor.is_floating_point():
            raise UserError(
                f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, and {CONFIG} says floats {list(into.shape)}",
                _AGAIN,
            )
        into.copy_(tensor)
        unmet.discard(name)
    if unmet:
        raise UserError(f"{path}: {len(unmet)} tensors are missing, {min(unmet)} among them", _AGAIN)
    return model


def _clear(out: Path) -> None:
    """Remove what exports to `out` left that were killed; one that still goes on has its process."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.aside-*"):
        process = left.name.rpartition("-")[2]
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)


_NO_TOKENS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _special(directory: Path, vocabulary: int) -> dict[str, int | None]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the tokenizer in {directory} cannot be loaded: {said}", "give the one trained with"
        ) from error
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"the tokenizer in {directory} has {len(tokenizer)} tokens, and the model only {vocabulary}",
            "give the tokenizer that the model was trained with",
        )
    return {name: getattr(tokenizer, name) for name in _NO_TOKENS}


def _tensors(path: Path) -> Iterator[tuple[Path, str, Tensor]]:
    names = [WEIGHTS]
    if (path / INDEX).is_file():
        placed = _read_json(path / INDEX).get("weight_map")
        if not isinstance(placed, dict) or any(Path(str(name)).name != name for name in placed.values()):
            raise UserError(f"{path / INDEX}: it names no files beside it", _AGAIN)
        names = sorted(set(placed.values()))
    for name in names:
        file = path / name
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (it is no dict)
                    yield file, key, opened.get_tensor(key)
        except FileNotFoundError:
            raise UserError(
                f"{file} does not exist", "give a directory with weights in safetensors"
            ) from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {error}", _AGAIN) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist", "give a directory that transformers can load") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}", _AGAIN) from error
    if not isinstance(read, dict):
        raise UserError(f"{file} holds no object", _AGAIN)
    return read


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
