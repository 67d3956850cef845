import pytest
import transformers

# Set by transformers' common tests.
_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "slow",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by transformers' common tests")


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
