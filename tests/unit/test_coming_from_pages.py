"""The pages "Come from ..." show the scripts of examples/coming_from as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "ddp": ("ddp", "from_ddp"),
    "fsdp": ("fsdp", "from_fsdp"),
    "accelerate": ("with_accelerate", "from_ddp"),
    "deepspeed": ("zero3", "from_fsdp"),
}


@pytest.mark.parametrize("rival", SCRIPTS)
def test_a_page_shows_its_scripts(rival: str) -> None:
    page = (ROOT / "docs" / "how-to" / f"from-{rival}.md").read_text(encoding="utf-8")
    files = [ROOT / "examples" / "coming_from" / f"{name}.py" for name in SCRIPTS[rival]]
    texts = [file.read_text(encoding="utf-8").partition('"""\n\n')[2] for file in files]
    assert re.findall(r"```python\n(.*?)```", page, re.DOTALL) == texts


@pytest.mark.parametrize("script", sorted({after for _, after in SCRIPTS.values()}))
def test_a_script_after_brings_its_batches_to_the_session_s_device(script: str) -> None:
    """`session.prepare` moves the model there: on a machine with GPUs a batch on the CPU would raise."""
    text = (ROOT / "examples" / "coming_from" / f"{script}.py").read_text(encoding="utf-8")
    loop = text[text.index("for epoch in") : text.index("model(inputs)")]
    assert "inputs, labels = inputs.to(session.device), labels.to(session.device)" in loop


def test_every_page_s_command_names_a_script_that_is_there() -> None:
    for rival in SCRIPTS:
        page = (ROOT / "docs" / "how-to" / f"from-{rival}.md").read_text(encoding="utf-8")
        named = re.findall(r"examples/coming_from/\w+\.py", page)
        assert named
        assert [name for name in named if not (ROOT / name).exists()] == []
