"""The PEFT model of one learner, in two moves: a skeleton that holds no number, then base tensors that it
does not copy.

The skeleton is built once, on the meta device, by a process that forks: it computes nothing, so no thread
pool and no device context exists when learners are forked. `attach` then runs in each learner and points the
skeleton at the base, which may be read-only memory shared with every other learner: nothing here writes to
it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coresident.engines.pool.base.base import read
from coresident.engines.pool.learning.lora import streamline
from coresident.engines.pool.parameters import DPO
from coresident.engines.pool.quantised import checkpoint
from coresident.engines.pool.quantised.linear import PREFIX, NF4Linear
from coresident.engines.pool.quantised.names import is_state
from coresident.engines.pool.quantised.nf4 import Form
from coresident.errors import InternalError, UserError, nearest

_META = torch.device("meta")


def build_on_meta(base_dir: Path, settings: DPO) -> nn.Module:
    """The base's architecture with LoRA layers in it (a `peft.PeftModel`), every tensor on the meta device.

    Attention is PyTorch's own (`sdpa`), whose results on the CPU are equal from run to run. Raises UserError
    for a directory without a usable config.json and for targets that the architecture does not have.
    """
    with _without_bitsandbytes():
        from peft import LoraConfig, TaskType, get_peft_model

        base: Any = base_on_meta(base_dir, getattr(torch, settings.dtype))
        _check_targets(base, settings, base_dir)
        alpha = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
        lora = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=settings.rank,
            lora_alpha=alpha,
            target_modules=list(settings.targets),
            lora_dropout=0.0,
            bias="none",
        )
        with warnings.catch_warnings():
            # PEFT asks for a name that transformers has given up.
            warnings.filterwarnings("ignore", message=".is_gradient_checkpointing", category=FutureWarning)
            model: nn.Module = get_peft_model(base, lora, low_cpu_mem_usage=True)
    streamline(model, torch.bfloat16 if settings.adapter_products == "bfloat16" else None)
    # No dropout anywhere: policy and reference must be the same function of the same weights.
    return model.eval()


def base_on_meta(base_dir: Path, dtype: torch.dtype) -> nn.Module:
    """The base's architecture without a number in it; layers whose weights are in NF4 are 4-bit ones.

    Raises UserError for a directory without a usable config.json.
    """
    config = base_config(base_dir)
    forms = {}
    if getattr(config, "quantization_config", None):
        # transformers would ask for bitsandbytes.
        del config.quantization_config
        forms = checkpoint.forms(read(base_dir).tensors)
    with _without_bitsandbytes():
        from transformers import AutoModelForCausalLM

        try:
            with _META:
                base: nn.Module = AutoModelForCausalLM.from_config(
                    config,
                    dtype=dtype,
                    attn_implementation="sdpa",
                    trust_remote_code=False,
                )
        except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
            raise UserError(
                f"{base_dir / 'config.json'} describes no causal language model that can be built: {error}",
                "give a causal language model that this transformers knows, with sdpa attention",
            ) from error
    _put_in_4_bits(base, forms, dtype, base_dir)
    return base


def _put_in_4_bits(base: Any, forms: Mapping[str, Form], dtype: torch.dtype, base_dir: Path) -> None:
    prefix = f"{base.base_model_prefix}."
    known = dict(base.named_modules())
    for name, form in forms.items():
        # Files saved from the headless model lack its prefix.
        path = name if name in known else prefix + name
        layer = known.get(path)
        if type(layer) is not nn.Linear or (layer.out_features, layer.in_features) != form.shape:
            said = "not there" if layer is None else f"a {type(layer).__name__} of another kind or size"
            raise UserError(
                f"{base_dir} holds {name} in NF4, and in the model that config.json describes it is {said}",
                "give the weights that belong to this config.json",
            )
        base.set_submodule(path, NF4Linear(form, layer.bias is not None, dtype))


def base_config(base_dir: Path) -> Any:
    """The transformers configuration of a local directory. Raises UserError where there is none."""
    from transformers import AutoConfig

    if not (base_dir / "config.json").is_file():
        raise UserError(
            f"{base_dir} has no config.json", "give a Hugging Face directory of a causal language model"
        )
    try:
        return AutoConfig.from_pretrained(str(base_dir), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{base_dir / 'config.json'} cannot be used: {reason}", "give a model that transformers knows"
        ) from error


def attach(model: nn.Module, tensors: Mapping[str, Tensor], settings: DPO) -> None:
    """Give every tensor of the skeleton its value, without copying a base tensor.

    `tensors` are the base's, under their checkpoint names and in `settings.dtype`; they become frozen
    parameters that use the very memory given. LoRA A is drawn from a generator seeded with `settings.seed`,
    in the order of parameter names, as PEFT draws it (kaiming uniform, a = sqrt 5); LoRA B is zero. Both are
    float32, also on a bfloat16 base, and float64 on a float64 one. Raises UserError for a missing tensor, a
    wrong shape or dtype.
    """
    base = model.get_base_model()  # type: ignore[operator]
    dtype = getattr(torch, settings.dtype)
    _attach_base(base, tensors, dtype)
    device = next(iter(tensors.values())).device
    _recompute_buffers(base, device)
    draw_adapter(model, settings, device)
    left = [name for name, tensor in _all_tensors(model) if tensor.is_meta]
    if left:
        raise InternalError(f"after attaching the base, {left[0]} has no value")


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The frozen tensors that an attached model really computes with, by checkpoint name (a tied tensor
    once).
    """
    base = model.get_base_model()  # type: ignore[operator]
    return {
        _checkpoint_name(name): tensor for name, tensor in base.named_parameters() if not _is_adapter(name)
    }


def _attach_base(base: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    shared: dict[str, nn.Parameter] = {}
    for name, skeleton in list(base.state_dict(keep_vars=True).items()):
        if _is_adapter(name):
            continue
        key = _source(_checkpoint_name(name), tensors, base)
        if key not in shared:
            _check_fits(key, tensors[key], skeleton, dtype)
            shared[key] = nn.Parameter(tensors[key], requires_grad=False)
            # transformers' own initialisers leave a tensor with this mark alone.
            shared[key]._is_hf_initialized = True  # type: ignore[attr-defined]
        owner, _, leaf = name.rpartition(".")
        module = base.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = shared[key]
        else:
            # A buffer that the model may update belongs to the learner, not to the base.
            module._buffers[leaf] = tensors[key].clone()


def _source(name: str, tensors: Mapping[str, Tensor], base: Any) -> str:
    """Which checkpoint tensor is the parameter `name`: itself, or the one it is tied to, as transformers
    decides it.

    A file that holds both ends of a tie with different values is believed over the configuration, as there.
    """
    ties: dict[str, str] = dict(base.all_tied_weights_keys)
    candidates = [name]
    if name in ties:
        other = ties[name]
        both = name in tensors and other in tensors
        if not both or torch.equal(tensors[name], tensors[other]):
            candidates = [other, name]
    candidates += [target for target, source in ties.items() if source == name]
    # Files saved from the headless model lack its prefix.
    prefix = f"{base.base_model_prefix}."
    candidates += [candidate.removeprefix(prefix) for candidate in candidates]
    for candidate in candidates:
        if candidate in tensors:
            return candidate
    raise UserError(
        f"the base has no tensor {name!r}, which its config.json asks for",
        "give the weights that belong to this config.json, complete",
    )


def _check_fits(name: str, tensor: Tensor, skeleton: Tensor, dtype: torch.dtype) -> None:
    if tensor.shape != skeleton.shape:
        raise UserError(
            f"the base's tensor {name!r} is {list(tensor.shape)}, in config.json {list(skeleton.shape)}",
            "give the weights that belong to this config.json",
        )
    # How a quantised weight is held is not the run's to choose.
    wanted = skeleton.dtype if is_state(name) else dtype
    if skeleton.is_floating_point() and tensor.dtype != wanted:
        raise InternalError(f"the base's tensor {name!r} was loaded as {tensor.dtype}, not as {dtype}")


def _recompute_buffers(base: Any, device: torch.device) -> None:
    """Fill the buffers that no file holds (rotary frequencies) by transformers' own initialiser.

    It runs twice, from buffers of zeros and of ones: where the results differ it did not know the buffer.
    """
    for path, module in base.named_modules():
        names = [name for name, value in module.named_buffers(recurse=False) if value.is_meta]
        if not names:
            continue
        results = []
        for fill in (0, 1):
            for name in names:
                module._buffers[name] = torch.full_like(module._buffers[name], fill, device=device)
            with torch.no_grad():
                base._init_weights(module)
            results.append([module._buffers[name] for name in names])
        for name, first, second in zip(names, *results, strict=True):
            if not torch.equal(first, second):
                raise UserError(
                    f"{path}.{name}, a buffer of {type(base).__name__}, cannot be recomputed",
                    "use a base of another architecture",
                )


def draw_adapter(model: nn.Module, settings: DPO, device: torch.device) -> None:
    """Give the adapter the values that it starts with, the same in every arm (see `attach`)."""
    dtype = torch.float64 if settings.dtype == "float64" else torch.float32
    source = torch.Generator().manual_seed(settings.seed)
    adapter = {name: value for name, value in model.named_parameters() if _is_adapter(name)}
    for name in sorted(adapter):
        # Drawn on the CPU in float32 whatever the run's device and dtype, so that all of them start from the
        # same numbers.
        value = torch.zeros(adapter[name].shape, dtype=torch.float32)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=source)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value.to(device, dtype))


def _check_targets(base: nn.Module, settings: DPO, base_dir: Path) -> None:
    known = {
        name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)
    }
    for target in settings.targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in base.named_modules()):
            raise UserError(
                f"the base {base_dir} has no layer {target!r} to adapt (targets)", nearest(target, known)
            )


def _checkpoint_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(f".{PREFIX}", ".weight.")


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """PEFT imports bitsandbytes where it is installed, and that initialises CUDA, after which no process may
    fork.
    """
    name = "bitsandbytes"
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]
