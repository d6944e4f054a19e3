"""What to type: the commands that would mend a starved training, with the user's own paths."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tokenmill import remote
from tokenmill.engines.end_tokens import resolve_eos
from tokenmill.errors import TokenizerError

if TYPE_CHECKING:
    from tokenmill.diagnosis.measuring import Request
    from tokenmill.diagnosis.values import Recommendation
    from tokenmill.engines.base import TokenizerInfo

STORE = "store"
SHOWN_INPUTS = 8


def fix_commands(
    request: Request, info: TokenizerInfo, recommendation: Recommendation | None
) -> tuple[str, ...]:
    """Build once, then load: a command and a line of Python."""
    inputs = [remote.shown(each) for each in request.inputs[:SHOWN_INPUTS]]
    command = ["tokenmill", "build", *inputs, "--tokenizer", request.tokenizer, "--out", STORE]
    if request.text_field != "text":
        command += ["--text-field", request.text_field]
    if request.separator is not None:
        command += ["--separator", _escaped(request.separator)]
    if not _names_eos(info):
        command += ["--eos", "TOKEN"]
    if recommendation is not None:
        command += ["--workers", str(recommendation.build_workers)]
        command += ["--memory", f"{recommendation.build_memory_bytes // 10**6}MB"]
    shown = shlex.join(command)
    if len(request.inputs) > SHOWN_INPUTS:
        shown = shown.replace(" --tokenizer", " ... --tokenizer", 1)
    loader = f'tokenmill.Loader("{STORE}", seq_len={request.seq_len}, batch_size=8)'
    return shown, f"import tokenmill; loader = {loader}"


def eos_note(info: TokenizerInfo) -> list[str]:
    """What the user must still decide, where the tokenizer does not say it."""
    try:
        resolve_eos(info)
    except TokenizerError as error:
        return [f"For the build: {error.message}."]
    return []


def _names_eos(info: TokenizerInfo) -> bool:
    return not eos_note(info)


def _escaped(separator: str) -> str:
    return separator.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
