"""Reading and writing transformers' checkpoints when a rank holds only its own experts.

The names and layouts of every family come from transformers' own table of weight conversions; what is added here is
that a rank reads only its experts, that nothing is left out in silence, and the way back over an EP group.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from mok.comm import Communicator, as_communicator
from mok.nn import MoKExperts, MoKLayer

_EXPERT_KEY = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


def load_checkpoint(
    layer_or_model: nn.Module, path: str | PathLike[str], *, prefix: str = "", device: torch.device | str | None = None
) -> None:
    """Read a safetensors checkpoint into a `MoKLayer` or a transformers model, this rank's experts only.

    `path` is a folder that holds `model.safetensors` or `model.safetensors.index.json`, or one such file; experts may
    be stored one by one or stacked, under any of transformers' names. `prefix` names the block to read into a
    `MoKLayer` ("model.layers.0.mlp"); other keys are then ignored. A model takes every key. Tensors on the meta device
    are created on `device` (default: cpu); others keep device and dtype, and the values are cast.

    Raises one `ValueError`, on every rank of the EP group and before anything is written, that lists all missing keys,
    surplus keys, wrong shapes and unreadable files.
    """
    if not isinstance(layer_or_model, (MoKLayer, PreTrainedModel)):
        raise TypeError(f"layer_or_model: expected MoKLayer or PreTrainedModel, got {type(layer_or_model).__name__}")
    if prefix and not isinstance(layer_or_model, MoKLayer):
        raise ValueError(f"prefix: expected '' with a {type(layer_or_model).__name__}, got {prefix!r}")
    plan = _Plan(layer_or_model, prefix.rstrip("."))
    plan.open(Path(path))
    if not plan.problems["unreadable"]:
        plan.match()
        plan.check()
    comm = _communicator(layer_or_model)
    comm.agree("load_checkpoint", {}, plan.error(f"path: {path} does not fit {type(layer_or_model).__name__}"))
    try:
        plan.copy(torch.device(device or "cpu"))
    except (OSError, SafetensorError) as error:
        plan.problems["unreadable"].append(str(error))
    comm.agree("load_checkpoint", {}, plan.error(f"path: reading {path} broke off"))
    if isinstance(layer_or_model, PreTrainedModel):
        _initialise_tables(layer_or_model, torch.device(device or "cpu"))
        # As from_pretrained does, so that the model is written in the style it was read in.
        used = [transform for transform in plan.transforms if transform.was_used()]
        object.__setattr__(layer_or_model, "_weight_conversions", used)


def to_hf_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The whole model under its keys on disk, the experts of all ranks included (on the CPU when gathered).

    Collective: every rank of the EP group must call it. Tied weights appear once. Tensors may share memory with the
    model's.
    """
    _check_model(model)
    return _as_on_disk(model, dict(_gathered(model)))


def save_pretrained(model: PreTrainedModel, path: str | PathLike[str], **kwargs: Any) -> None:
    """`model.save_pretrained(path, **kwargs)` with the experts of all ranks: files that plain transformers loads.

    Collective: every rank of the EP group must call it. Global rank 0 writes, and the files are complete when the call
    returns on any rank of its group. Raises `ValueError` on all of these if writing fails.
    """
    _check_model(model)
    comm = _communicator(model)
    writes = writes_files(comm)
    whole = {name: tensor for name, tensor in _gathered(model) if writes}
    failure = None
    if writes:
        try:
            model.save_pretrained(path, state_dict=_as_on_disk(model, whole), save_original_format=False, **kwargs)
        except Exception as error:  # whatever it is, the other ranks wait for word of it
            failure = ValueError(f"path: writing {path} failed: {error!r}")
    comm.agree("save_pretrained", {}, failure)


def writes_files(comm: Communicator) -> bool:
    """Whether this is the one process that writes what all have."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return comm.rank == 0 and (not distributed or torch.distributed.get_rank() == 0)


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected PreTrainedModel, got {type(model).__name__}")
    for name, experts in _experts(model):
        if experts.lora is not None:
            raise ValueError(
                f"model: expected no adapters, got some in {name[:-1]}; save_lora, then merge or remove them"
            )


class _Whole:
    """`model`, with the shapes that its parameters have when gathered; transformers' conversions look at them."""

    def __init__(self, model: PreTrainedModel, whole: dict[str, torch.Tensor]) -> None:
        self._model, self.get_parameter = model, whole.__getitem__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _as_on_disk(model: PreTrainedModel, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    untied = remove_tied_weights_from_state_dict(whole, model)
    model_with_shapes: Any = _Whole(model, whole)
    return revert_weight_conversion(model_with_shapes, untied)


def _experts(model: nn.Module) -> Iterator[tuple[str, MoKExperts]]:
    for name, module in model.named_modules():
        if isinstance(module, MoKExperts):
            yield (f"{name}." if name else ""), module


def _communicator(model: nn.Module) -> Communicator:
    """The EP group of the model's experts (they share one); a single rank where there are none."""
    return as_communicator(next((experts.process_group for _, experts in _experts(model)), None))


def _gathered(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """`state_dict()` with whole experts, one parameter at a time. Collective."""
    comm = _communicator(model)
    spread = {prefix + name for prefix, _ in _experts(model) for name in ("gate_up_proj", "down_proj")}
    for name, tensor in model.state_dict().items():
        if comm.size > 1 and name in spread:
            tensor = comm.all_gather(tensor).flatten(0, 1).cpu()
        yield name, tensor


def _layer_transforms() -> list[WeightTransform]:
    """From the names that the families use on disk to those of a `MoKLayer`."""
    renamed = {
        r"^(router\.gate|gate\.wg|gate|router\.layer)\.weight$": "router.weight",
        r"^(gate\.|mlp\.|experts\.)?(e_score_correction_bias|expert_bias)$": "router.e_score_correction_bias",
        r"^(shared_experts|shared_mlp)\.": "shared_expert.",
        r"^experts\.input_linear\.weight$": "experts.gate_up_proj",
    }
    transforms: list[WeightTransform] = [WeightRenaming(source, target) for source, target in renamed.items()]
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        transforms += [
            WeightConverter(
                [f"experts.*.{gate}.weight", f"experts.*.{up}.weight"],
                "experts.gate_up_proj",
                [MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(f"experts.*.{down}.weight", "experts.down_proj", [MergeModulelist(dim=0)]),
        ]
    return transforms


@dataclass
class _Target:
    """A tensor of the model, the transform that makes it and the (key, pattern) pairs it is made of."""

    transform: WeightRenaming | WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)


class _Plan:
    """What is read from where; built and checked from the headers of the files alone."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self.model = model
        self.prefix = f"{prefix}." if prefix else ""
        self.problems: dict[str, list[str]] = defaultdict(list)
        self.slices: dict[str, Any] = {}
        self.targets: dict[str, _Target] = {}
        self.expected: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.transforms = (
            get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else _layer_transforms()
        )
        # Stacked experts by name: first expert, number of experts here, number of experts in all.
        self.shards: dict[str, tuple[int, int, int]] = {}
        own = {name: as_communicator(experts.process_group) for name, experts in _experts(model)}
        for name, tensor in self.expected.items():
            if tensor.ndim == 3 and "experts" in name.split("."):
                comm = own.get(name.rpartition(".")[0] + ".")
                rank, size = (comm.rank, comm.size) if comm else (0, 1)
                self.shards[name] = (rank * tensor.shape[0], tensor.shape[0], size * tensor.shape[0])

    def open(self, path: Path) -> None:
        """Read the headers."""
        if path.is_dir():
            index = path / "model.safetensors.index.json"
            path = index if index.is_file() else path / "model.safetensors"
        promised: dict[str, str] = {}
        try:
            if path.suffix == ".json":
                promised = json.loads(path.read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            self.problems["unreadable"].append(f"{path.name}: {error!r}")
            return
        for file in sorted(set(promised.values())) or [path.name]:
            try:
                handle = safe_open(path.parent / file, framework="pt")
            except (OSError, SafetensorError) as error:
                self.problems["unreadable"].append(f"{file}: {error}")
                continue
            self.slices |= {
                key.removeprefix(self.prefix): handle.get_slice(key)
                for key in handle.keys()  # noqa: SIM118  (not a dict)
                if key.startswith(self.prefix)
            }
            absent = [key for key, where in promised.items() if where == file and key not in handle.keys()]  # noqa: SIM118
            self.problems["missing"] += [f"{key} (promised in {file})" for key in absent]

    def match(self) -> None:
        """Assign each key to the tensor of the model that it becomes (a part of)."""
        renamings = [entry for entry in self.transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self.transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        ignored = [*self._ignored("_keys_to_ignore_on_load_unexpected"), r"rotary_emb\.inv_freq$"]
        for key in sorted(self.slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters)
            if name not in self.expected and key in self.expected:
                name, pattern = key, None
            if name not in self.expected:
                if not any(re.search(pattern, name) for pattern in ignored):
                    self.problems["surplus"].append(self.prefix + key)
            elif pattern is None:
                self.targets[name] = _Target(WeightRenaming(key, name), [(key, key)])
            else:
                target = self.targets.setdefault(name, _Target(by_pattern[pattern]))
                target.sources.append((key, pattern))

    def check(self) -> None:
        """Build every target on the meta device, and compare names and shapes with the model's."""
        shapes: dict[str, torch.Size] = {}
        for name, target in self.targets.items():
            if self._expert_numbers_fit(name, target):
                try:
                    shapes |= {key: value.shape for key, value in self._build(name, target, meta=True).items()}
                except (RuntimeError, ValueError) as error:
                    parts = ", ".join(f"{key} {self.slices[key].get_shape()}" for key, _ in target.sources)
                    self.problems["wrong shape"].append(f"{self.prefix}{name} (can not be made of {parts}: {error})")
            shapes.setdefault(name, self.expected[name].shape)
        filled = {id(self.expected[name]) for name in shapes if name in self.expected}
        ignored = self._ignored("_keys_to_ignore_on_load_missing")
        for name, tensor in self.expected.items():
            if name in shapes and shapes[name] != tensor.shape:
                message = f"{self.prefix}{name} (expected {list(tensor.shape)}, got {list(shapes[name])})"
                self.problems["wrong shape"].append(message)
            # A tied tensor needs one of its names only.
            if id(tensor) not in filled and not any(re.search(pattern, name) for pattern in ignored):
                self.problems["missing"].append(self.prefix + name)

    @torch.no_grad()
    def copy(self, device: torch.device) -> None:
        """Read the tensors, one target at a time."""
        names = defaultdict(list)
        for name, tensor in self.expected.items():
            names[id(tensor)].append(name)
        for name, target in self.targets.items():
            for key, value in self._build(name, target, meta=False).items():
                old = self.expected[key]
                if old.is_meta:
                    value = value.to(device, old.dtype, copy=True)
                    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
                    for alias in names[id(old)]:
                        _set_tensor(self.model, alias, new)
                else:
                    old.copy_(value)

    def error(self, headline: str) -> ValueError | None:
        """All that was found wrong, in one error."""
        found = {kind: names for kind, names in self.problems.items() if names}
        lines = [f"\n  {kind} ({len(names)}): {', '.join(names)}" for kind, names in found.items()]
        return ValueError(headline + "".join(lines)) if lines else None

    def _ignored(self, attribute: str) -> list[str]:
        return list(getattr(self.model, attribute, None) or [])

    def _expert_numbers_fit(self, name: str, target: _Target) -> bool:
        """Whether every expert is there with all its parts; what is not goes to `problems`."""
        total = self.shards.get(name, (0, 0, 0))[2]
        numbers: dict[str, dict[int, str]] = defaultdict(dict)
        for key, pattern in target.sources:
            if found := _EXPERT_KEY.search(key):
                numbers[pattern][int(found[0])] = key
        if not numbers or not total:
            return True
        fits = True
        some_key, some_pattern = next((key, pattern) for key, pattern in target.sources if pattern in numbers)
        for pattern in target.transform.source_patterns:
            here = numbers.get(pattern, {})
            # The names of keys that are not there are made after one that is.
            template = next(iter(here.values()), some_key.replace(_tail(some_pattern), _tail(pattern)))
            absent = [_EXPERT_KEY.sub(str(number), template) for number in range(total) if number not in here]
            beyond = [key for number, key in here.items() if number >= total]
            self.problems["missing"] += [self.prefix + key for key in absent]
            self.problems["surplus"] += [self.prefix + key for key in beyond]
            fits = fits and not absent and not beyond
        return fits

    def _build(self, name: str, target: _Target, *, meta: bool) -> dict[str, torch.Tensor]:
        """The tensors that `target` becomes: those of this rank's experts where they are spread."""
        transform = deepcopy(target.transform)
        first, count, _ = self.shards.get(name, (0, 0, 0))
        for key, pattern in target.sources:
            number = _EXPERT_KEY.search(key)
            if number and count and not first <= int(number[0]) < first + count:
                continue
            part = slice(first, first + count) if count and not number else slice(None)
            tensor: Any = _read(self.slices[key], part, meta=meta)
            transform.add_tensor(name, key, pattern, tensor)
        config = getattr(self.model, "config", None)
        built = transform.convert(name, model=self.model, config=config)
        return {key: value[0] if isinstance(value, list) else value for key, value in built.items()}


def _tail(pattern: str) -> str:
    """`experts.*.w1.weight` -> `.w1.weight`."""
    return pattern.rpartition("*")[2].replace("\\", "")


def _read(tensor: Any, part: slice, *, meta: bool) -> torch.Tensor:
    """Rows `part` of a tensor on file, or their shape on the meta device."""
    shape = tensor.get_shape()
    if not meta:
        return tensor[part] if shape else tensor[...]
    rows = [len(range(*part.indices(shape[0])))] if shape else []
    return torch.empty(rows + shape[1:], device="meta")


def _set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        module._parameters[attribute] = tensor
    else:
        module._buffers[attribute] = tensor


def _initialise_tables(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that are on no file (rotary tables), if the model came from the meta device."""
    tables = [(name, buffer) for name, buffer in model.named_non_persistent_buffers() if buffer.is_meta]
    for name, buffer in tables:
        _set_tensor(model, name, torch.empty_like(buffer, device=device))
    if tables:
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # transformers' mark for "leave as it is"
        model.initialize_weights()
