"""transformers' own common tests of a model, with mok in the place of its default experts.

The mix-in is in transformers' source distribution but not in its wheel: pip fetches it once, into pytest's cache.
"""

import importlib
import subprocess
import sys
import tarfile
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import mok.hf
from mok.hf.experts import experts_forward

_CACHE = Path(__file__).parents[2] / ".pytest_cache"
_PACKAGE = "transformers_common_tests"


def _import_common() -> Any:
    """`tests/test_modeling_common.py` of the installed version; skips this file where it can not be had."""
    folder = _CACHE / f"transformers-{transformers.__version__}"
    source = folder / "test_modeling_common.py"
    if not source.exists():
        wanted = [f"transformers=={transformers.__version__}", "--no-binary=transformers", "--no-deps"]
        pip = [sys.executable, "-m", "pip", "download", *wanted, "--no-build-isolation", "--dest", str(folder)]
        result = subprocess.run(pip, capture_output=True, text=True, timeout=200)
        if result.returncode != 0:
            pytest.skip(f"pip can not fetch transformers' tests: {result.stderr[-300:]}", allow_module_level=True)
        archive = next(folder.glob("*.tar.gz"))
        with tarfile.open(archive) as files:
            member = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/tests/{source.name}")
            assert member is not None
            source.write_bytes(member.read())
        archive.unlink()
    # The two mix-ins that it imports are in no distribution.
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    for module, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        stub = types.ModuleType(f"{_PACKAGE}.{module}")
        setattr(stub, name, type(name, (), {}))
        sys.modules[stub.__name__] = stub
        sys.modules[stub.__name__.rpartition(".")[0]] = types.ModuleType(stub.__name__.rpartition(".")[0])
    return importlib.import_module(f"{_PACKAGE}.test_modeling_common")


common = _import_common()


class _Tester:
    """What the mix-in asks for."""

    batch_size, seq_length, is_training = 2, 7, True
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> transformers.PreTrainedConfig:
        config = {**tiny.CONFIGS[self.family], "initializer_range": 0.02}
        return transformers.AutoConfig.for_model(self.family, **config)

    def prepare_config_and_inputs_for_common(self) -> tuple[transformers.PreTrainedConfig, dict[str, torch.Tensor]]:
        shape, seeded = (self.batch_size, self.seq_length), torch.Generator().manual_seed(0)
        input_ids = torch.randint(3, tiny.VOCAB_SIZE, shape, generator=seeded)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


@pytest.fixture(autouse=True, scope="module")
def _mok_is_the_default() -> Iterator[None]:
    """transformers takes "grouped_mm" when nothing is asked for, also in models that a test loads again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", experts_forward)
        patch.setattr(common, "grouped_mm_experts_forward", experts_forward)
        yield


class _Common(common.ModelTesterMixin):
    all_generative_model_classes = ()
    family = ""

    def setUp(self) -> None:
        self.model_tester = _Tester(self.family)


def _converted(cls: type[transformers.PreTrainedModel]) -> type[transformers.PreTrainedModel]:
    """The class, made to convert each of its models when it is built; so from_pretrained fills converted models."""

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        cls.__init__(self, config)
        mok.hf.convert(self)

    cannot = classmethod(lambda cls: False)
    own = {"__init__": __init__, "__module__": cls.__module__, "_can_set_experts_implementation": cannot}
    return type(cls.__name__, (cls,), own)


class _DeepseekV3(_Common):
    family = "deepseek_v3"
    # Its plan names q_proj too, which only models without q_lora_rank have (transformers 5.25).
    test_tp_plan_matches_params = None


class TestConvertedDeepseekV3(_DeepseekV3, unittest.TestCase):
    all_model_classes = (_converted(transformers.DeepseekV3Model), _converted(transformers.DeepseekV3ForCausalLM))
    # transformers initialises what it knows by class, and it does not know MoKExperts.
    test_can_init_all_missing_weights = None


class TestQwen3Moe(_Common, unittest.TestCase):
    family = "qwen3_moe"
    all_model_classes = (transformers.Qwen3MoeModel, transformers.Qwen3MoeForCausalLM)


class TestMixtral(_Common, unittest.TestCase):
    family = "mixtral"
    all_model_classes = (transformers.MixtralModel, transformers.MixtralForCausalLM)


class TestDeepseekV3(_DeepseekV3, unittest.TestCase):
    all_model_classes = (transformers.DeepseekV3Model, transformers.DeepseekV3ForCausalLM)
