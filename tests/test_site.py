"""The pages and the site that is made of them: all are there, links hold, how-tos can be typed."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.browser import browser, screens, tab
from tests.command import tokenmill, tokenmill_here
from tests.interop import peers
from tests.pages import DOCS, blocks
from tests.store.s3_server import s3_session

import tokenmill as package

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = DOCS.parent
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
HOW_TO = DOCS / "how-to"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
LINK = re.compile(r"^```.*?^```|`[^`\n]*`|\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE)
# Trained or shown to somebody: not in a test that everybody waits for.
LONG = ("train", "diagnose", "view")
# What a test trains instead.
SMALLER = {
    "hidden_size=256": "hidden_size=32",
    "intermediate_size=1024": "intermediate_size=64",
    "num_hidden_layers=4": "num_hidden_layers=1",
    "seq_len=512": "seq_len=64",
    "max_length=2048": "max_length=64",
    "max_steps=100": "max_steps=2",
    "save_steps=50": "save_steps=2",
    "eval_steps=50": "eval_steps=2",
    '"cuda"': '"cpu"',
}

TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.role == "assistant" %}\
{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def in_navigation(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for each in part.values() if isinstance(part, dict) else part:
            yield from in_navigation(each)


def test_every_page_is_in_the_navigation() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = {*in_navigation(settings["nav"])}
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    listed = {page for page in pages if page.startswith("decisions/")}  # by docs/site.py
    assert len(listed) > 20
    assert pages - listed <= named
    elsewhere = {f"project/{page.name}" for page in ROOT.glob("*.md") if page.name != "README.md"}
    assert named - pages == {*elsewhere, "index.md", "examples/index.md", "decisions/index.md"}


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {f"tokenmill.{name}" for name in package.__all__}
    public -= {"tokenmill.__version__", "tokenmill.TokenmillError"}  # said, and shown as errors
    public |= {"tokenmill.errors"}
    for name in ("torch", "hf", "lightning", "stalls"):
        code = (ROOT / "src" / "tokenmill" / name).with_suffix(".py")
        code = code if code.is_file() else code.with_suffix("") / "__init__.py"
        (names,) = re.findall(r"^__all__ = \[(.*?)\]", code.read_text(), re.DOTALL | re.MULTILINE)
        public |= {f"tokenmill.{name}.{each}" for each in re.findall(r'"(\w+)"', names)}
    assert len(public) > 60
    # The meter has two addresses, and one entry.
    assert public - shown == {"tokenmill.StallMeter", "tokenmill.StallReport"}
    assert shown <= public


def anchors(page: Path) -> set[str]:
    """What links can lead to on a page, as the repository has it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", each) for each in headings)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}


def test_links_of_pages_lead_to_what_is_there() -> None:
    followed = 0
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            to, _, anchor = link.partition("#")
            if not link or ":" in to:
                continue
            target = (page.parent / to).resolve() if to else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.relative_to(ROOT)}: {link}"
            followed += 1
    assert followed > 150


@pytest.fixture(scope="module")
def materials(
    tmp_path_factory: pytest.TempPathFactory, training_texts: list[str], bpe_tokenizer_dir: Path
) -> Path:
    """What the how-tos begin with."""
    folder = tmp_path_factory.mktemp("how-to")
    parts = [text[at : at + 500] for text in training_texts[:7] for at in range(0, 20_000, 500)]
    lines = [json.dumps({"text": part}) + "\n" for part in parts]
    (folder / "data").mkdir()
    for number in range(2):
        (folder / "data" / f"{number}.jsonl").write_text("".join(lines[number::2]))
    for path in bpe_tokenizer_dir.iterdir():
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def place(materials: Path, tmp_path: Path) -> Path:
    """A folder of its own for a page."""
    return Path(shutil.copytree(materials, tmp_path / "place"))


def type_commands(page: Path, place: Path) -> list[str]:
    """Type the commands of a page, but those that take long; all that it says."""
    typed = []
    for words, _ in blocks(page):
        if words[:1] == ["tokenmill"] and words[1] not in LONG:
            tokenmill_here(*words[1:], "--json", folder=place)
            typed.append(words[1])
    return typed


def code_of(page: Path) -> str:
    (code,) = (block.code for block in blocks(page) if block.code)
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


def run_code(page: Path, place: Path) -> list[tuple[int, ...]]:
    """Run the code of a page here; the shapes of what it trained on."""
    seen: list[tuple[int, ...]] = []

    def train_step(inputs: Any, targets: Any) -> None:
        assert (inputs[0, 1:] == targets[0, :-1]).all()
        seen.append(tuple(inputs.shape))

    with contextlib.chdir(place):
        exec(compile(code_of(page), page.name, "exec"), {"train_step": train_step})
    return seen


def test_the_laptop(place: Path) -> None:
    page = HOW_TO / "laptop.md"
    typed = type_commands(page, place)
    assert typed == ["plan", "build", "verify", "inspect", "layout"]
    run_code(page, place)


def test_megatron(place: Path) -> None:
    page = HOW_TO / "megatron.md"
    assert type_commands(page, place) == ["build", "export"]
    said = json.loads((place / "megatron" / "data-args.json").read_text())
    assert {"train", "valid"} <= said.keys()
    assert "--per-split-data-args-path megatron/data-args.json" in page.read_text()
    run_code(page, place)


def test_slurm(place: Path) -> None:
    typed = type_commands(HOW_TO / "slurm.md", place)
    assert typed == ["build", "build", "finish", "verify"]


@pytest.mark.slow
def test_the_bucket(place: Path) -> None:
    import fsspec

    page = HOW_TO / "bucket.md"
    with s3_session():
        bucket = fsspec.filesystem("s3")
        bucket.mkdir("my-bucket")
        bucket.put(f"{place}/data/", "my-bucket/raw/", recursive=True)
        assert type_commands(page, place) == ["build", "verify"]
        seen = run_code(page, place)
    assert seen
    assert set(seen) == {(8, 64)}


@pytest.mark.slow
def test_training_on_slurm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    page = HOW_TO / "slurm.md"
    type_commands(page, place)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        seen = run_code(page, place)
    finally:
        distributed.destroy_process_group()
    assert set(seen) == {(8, 64)}


@pytest.mark.slow
def test_training_on_the_laptop(place: Path) -> None:
    type_commands(HOW_TO / "laptop.md", place)
    (words,) = (words for words, _ in blocks(HOW_TO / "laptop.md") if words[1:2] == ["train"])
    tokenmill(*words[1:], folder=place)
    assert (place / "run" / "metrics.jsonl").is_file()


def run_program(code: str, place: Path, *more: str) -> str:
    """Run a page's code as a program, with what else is to be imported."""
    (place / "page.py").write_text(code)
    path = os.pathsep.join([*more, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_hugging_face_trainer(place: Path) -> None:
    page = HOW_TO / "hugging-face-trainer.md"
    assert type_commands(page, place) == ["build"]
    *_, loss = run_program(code_of(page), place).splitlines()
    assert 5 < float(loss) < 9
    assert (place / "run" / "checkpoint-2" / "trainer_state.json").is_file()


@pytest.mark.slow
def test_trl(place: Path) -> None:
    peers.require("trl")
    page = HOW_TO / "trl.md"
    (place / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / name, place / "model")
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    make_model = """
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
size = len(AutoTokenizer.from_pretrained("model/"))
config = LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2)
LlamaForCausalLM(config).save_pretrained("model/")
"""
    run_program(make_model, place)
    said = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 40)
    assert type_commands(page, place) == ["build", "inspect"]
    counted = "print(sum(x != -100 for row in trainer.train_dataset for x in row['labels']))\n"
    *_, found = run_program(code_of(page) + counted, place, str(peers.PEERS)).splitlines()
    assert int(found) == package.Store(place / "chats").num_counted > 0


@pytest.mark.slow
def test_torchtitan(place: Path) -> None:
    peers.require("torchtitan")
    page = HOW_TO / "torchtitan.md"
    assert type_commands(page, place) == ["build"]
    asked = """
loader = my_run().dataloader.build(
    dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=64, local_batch_size=4,
    snapshot_every_n_steps=None,
)
inputs, labels = next(iter(loader))
print(tuple(inputs["input"].shape), tuple(labels.shape))
"""
    # Its models cannot be imported where there is no Triton; that this one is there can be seen.
    registry = (peers.PEERS / "torchtitan/models/llama3/config_registry.py").read_text()
    assert "def llama3_debugmodel() -> Trainer.Config:" in registry
    assert "dataloader=" in registry.partition("def llama3_debugmodel(")[2][:1500]
    theirs = "from torchtitan.models.llama3.config_registry import llama3_debugmodel"
    code = code_of(page).replace(theirs, "from types import SimpleNamespace as llama3_debugmodel")
    assert theirs in code_of(page)
    paths = str(ROOT / "examples"), str(peers.PEERS)
    *_, shapes = run_program(code + asked, place, *paths).splitlines()
    assert shapes == "(4, 64) (4, 64)"


@pytest.mark.slow
def test_the_site_is_whole_and_asks_for_nothing_of_elsewhere(tmp_path: Path) -> None:
    if not MKDOCS.exists():
        pytest.skip("mkdocs is not there (.venv-docs): make docs brings it")
    site = tmp_path / "site"
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, env=quiet)
    shown = re.sub(r"<[^>]+>", "", (site / "reference" / "build.html").read_text())
    for function in (package.build, package.plan, package.finish, package.verify, package.export):
        options = [*inspect.signature(function).parameters]
        signature = shown.partition(f"\n{function.__name__}(\n")[2].partition("\n)")[0]
        assert options
        assert all(f"{name}: " in signature for name in options if name != "settings"), function
    pages = ["index.html", "how-to/trl.html", "reference/build.html", "benchmarks.html"]
    with browser() as address, tab(address) as opened:
        for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
            opened.resize(width=width, dark=dark)
            for page in pages:
                opened.open((site / page).as_uri())
                assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
                scheme = opened.evaluate("document.body.dataset.mdColorScheme")
                assert scheme == ("slate" if dark else "default")
                name = f"site-{Path(page).stem}-{width}-{'dark' if dark else 'light'}.png"
                (screens() / name).write_bytes(opened.screenshot(whole=False))
        # Found from a folder, without a server.
        opened.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
        opened.send("Input.insertText", text="TrainerDataset")
        opened.wait("!!document.querySelector('.md-search-result__item')")
        assert all(url.startswith(("file://", "data:")) for url in opened.seen.requests)
        assert opened.seen.problems == []
