"""Text for the fine-tuning example: documents, a tokenizer, and blocks of tokens."""

import ast
import json
import re
import sysconfig
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


class InputError(Exception):
    """Something the user gave that can not be used."""


def python_text() -> tuple[list[str], list[str], list[str]]:
    """Documents for the base model (docstrings), for fine-tuning (topics of `help`), and held out (every sixth).

    No paragraph of a later list is in an earlier one.
    """
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::6]
    tuning = without_paragraphs_of(held_out, [text for index, text in enumerate(texts) if index % 6])
    return without_paragraphs_of(held_out + tuning, standard_library_docstrings()), tuning, held_out


def standard_library_docstrings() -> list[str]:
    """The docstrings of each top-level module of the standard library, one document a module."""
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        documents.append("\n\n".join(filter(None, docstrings)))
    return documents


def without_paragraphs_of(others: list[str], documents: list[str]) -> list[str]:
    seen = {paragraph for other in others for paragraph in paragraphs(other)}
    return ["\n\n".join(p for p in paragraphs(document) if p not in seen) for document in documents]


def paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if part]


def read_documents(path: Path) -> list[str]:
    """One document of a text file, or one of the "text" of each line of a JSONL file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data: {path} can not be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'--data: {path}:{number}: expected {{"text": "..."}}, got {line[:60]!r}') from error
        if not isinstance(document, str):
            raise InputError(f'--data: {path}:{number}: "text": expected a string, got {document!r:.60}')
        documents.append(document)
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair encoding: any text can be encoded, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def load_tokenizer(path: Path) -> Any:
    if not path.is_dir():
        raise InputError(f"--model: expected a folder with a Hugging Face checkpoint, got {path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--model: {path} has no tokenizer that can be used: {error}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model: the tokenizer of {path} has no end-of-text token")
    return tokenizer


def to_blocks(documents: list[str], tokenizer: Any, sequence_length: int) -> torch.Tensor:
    """All documents, each closed by the end-of-text token, in rows `[N, sequence_length + 1]`; the rest is dropped."""
    ids = [token for document in documents for token in [*tokenizer.encode(document), tokenizer.eos_token_id]]
    width = sequence_length + 1
    return torch.tensor(ids[: len(ids) // width * width], dtype=torch.int64).view(-1, width)
