"""mok for Hugging Face transformers.

`register()` makes `experts_implementation="mok"` a choice of every model; `convert(model)` replaces whole MoE blocks by
`mok.nn.MoKLayer`; `load_checkpoint`, `to_hf_state_dict` and `save_pretrained` read and write transformers' files,
`load_lora` and `save_lora` PEFT's, also when the experts are spread over an expert-parallel (EP) group.
"""

try:
    import transformers.core_model_loading  # noqa: F401  (new in transformers 5)
except ImportError as error:
    raise ImportError('mok.hf needs transformers 5: pip install "mok[hf]"') from error

from mok.hf.checkpoint import load_checkpoint, save_pretrained, to_hf_state_dict
from mok.hf.convert import convert
from mok.hf.experts import register
from mok.hf.lora import load_lora, save_lora

__all__ = ["convert", "load_checkpoint", "load_lora", "register", "save_lora", "save_pretrained", "to_hf_state_dict"]
