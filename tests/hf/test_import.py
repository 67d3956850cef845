"""transformers is optional."""

import subprocess
import sys


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_mok_does_not_import_transformers() -> None:
    assert (
        run_python("import sys, mok, mok.functional, mok.nn; print('transformers' in sys.modules)").strip() == "False"
    )


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["transformers"] = None
try:
    import mok.hf
except ImportError as error:
    print(error)
"""
    assert 'pip install "mok[hf]"' in run_python(code)
