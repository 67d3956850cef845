"""mok: a mixture-of-experts layer for PyTorch. See `mok.nn` (layers), `mok.hf` (transformers) and `mok.functional`."""

__version__ = "0.1.0"

__all__ = ["__version__", "info"]


def info() -> None:
    """Print the versions, the devices, and which backends can be used here (and why the others can not)."""
    from mok._info import report

    print(report())
