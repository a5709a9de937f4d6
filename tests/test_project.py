"""The README, the public names and the project's own promises stay true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import anaphora
from tests.server.running import serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAPPED = ("src", "csrc", "docs", "examples", "benchmarks", ".ci")
MAPPED_AT_TOP = ("*.md", "*.toml", "*.txt", "Makefile", "LICENSE")


def file_map() -> set[str]:
    block = README.split("## File map")[1].split("```")[1]
    return {line.split()[0] for line in block.splitlines() if line and not line.startswith(" ")}


def real_files() -> set[str]:
    files = {path for folder in MAPPED for path in (ROOT / folder).rglob("*") if path.is_file()}
    files |= {path for pattern in MAPPED_AT_TOP for path in ROOT.glob(pattern)}
    names = {path.relative_to(ROOT).as_posix() for path in files}
    is_made = re.compile(r"__pycache__|\.so$|^benchmarks/compare/\.")
    is_plain_init = re.compile(r"src/anaphora/\w+/__init__\.py")
    return {n for n in names if not is_made.search(n) and not is_plain_init.fullmatch(n)}


def test_the_file_map_is_complete_and_true():
    assert file_map() - {"tests/"} == real_files()


def test_links_in_the_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_functions_that_the_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    names = re.findall(r"`(?:[\w/]+\.py:)?([A-Z]\w+)\.(\w+)`", text)
    assert len(names) > 10
    for owner, method in names:
        assert re.search(rf"class {owner}\b", source), owner
        assert re.search(rf"def {method}\b", source), f"{owner}.{method}"
    for path in re.findall(r"`((?:\w+/)?\w+\.py)(?::\w+)?", text):
        assert list((ROOT / "src").rglob(path)), path


def test_the_first_chat_of_the_readme_runs(capsys):
    snippet = README.split("```python")[1].split("```")[0]
    with serving() as serve:
        server = serve()
        server.llm.enqueue("Because of the air.")
        server.llm.enqueue("A longer way through it.")
        exec(
            snippet.replace("http://127.0.0.1:8000", server.url).replace(
                '"smollm2"', f'"{server.llm.info.name}"'
            ),
            {},
        )
    assert "cached_tokens=" in capsys.readouterr().out


@pytest.mark.parametrize("name", anaphora.__all__)
def test_public_names_load(name):
    assert getattr(anaphora, name).__name__ == name


def test_the_documents_hold_no_placeholder():
    for document in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"\b(FIGURES|DEMOTABLE|TBD|XXX)\b", document.read_text()), document


def test_public_names_are_few_and_sorted():
    assert len(anaphora.__all__) <= 10
    assert set(anaphora.__all__) == set(anaphora._HOMES)
    with pytest.raises(AttributeError, match="Turbo"):
        _ = anaphora.Turbo


def test_importing_anaphora_loads_nothing_heavy():
    code = "import sys, anaphora; print('numpy' in sys.modules, 'fastapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_default_install_needs_no_pytorch():
    assert "torch" not in (ROOT / "pyproject.toml").read_text()
