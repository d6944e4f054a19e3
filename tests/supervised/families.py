"""Chat templates in the manner of the well-known ones, and small tokenizers that go with them.

The templates are written for these tests. Each family has the trait that makes it hard: headers
and end tokens, trimmed content, special tokens that swallow white space, a space that only the
beginning of a text gets, generation blocks, tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

CHATML_GENERATION = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content ~ '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions:\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ '\\n' }}{% endfor %}{{ '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n<|python_tag|>' }}
{{- message.tool_calls[0].function | tojson }}{{ '<|eom_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- set ns = namespace(first='') %}
{%- if messages[0].role == 'system' %}
{%- set ns.first = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must take turns: user, assistant, user') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (ns.first if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}
"""

QWEN_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<\uff5cUser\uff5c>' + message.content }}
{%- else %}
{%- set said = message.content %}
{%- if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}
{{- '<\uff5cAssistant\uff5c>' + said + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}
"""

PHI = """
{%- for message in messages %}
{{- '<|' + message.role + '|>' + '\\n' + message.content + '<|end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

DEEPSEEK_TOKENS = (
    "<\uff5cbegin\uff5c>",
    "<\uff5cend\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
)


@dataclass(frozen=True, slots=True)
class Family:
    """A template, its special tokens, and the kind of tokenizer that it usually has."""

    name: str
    template: str
    kind: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None
    rstrip: bool = False
    roles: tuple[str, ...] = ("system", "user", "assistant")
    has_generation: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|end_of_text|>",
)
_QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    one.name: one
    for one in (
        Family("chatml", CHATML, "byte-level", _CHATML, eos="<|im_end|>"),
        Family(
            "chatml-generation",
            CHATML_GENERATION,
            "byte-level",
            _CHATML,
            eos="<|im_end|>",
            has_generation=True,
        ),
        # A space goes in front of the beginning of everything, and of nothing else.
        Family("chatml-first", CHATML, "first", _CHATML, eos="<|im_end|>"),
        Family("llama3", LLAMA3, "byte-level", _LLAMA, bos=_LLAMA[0], eos=_LLAMA[1]),
        Family("qwen", QWEN_TOOLS, "nfc", _CHATML, _QWEN, eos="<|im_end|>", has_generation=True),
        Family("mistral-v1", MISTRAL, "prepend", ("<s>", "</s>"), bos="<s>", eos="</s>"),
        Family(
            "mistral-v3",
            MISTRAL,
            "first",
            ("<s>", "</s>", "[INST]", "[/INST]"),
            bos="<s>",
            eos="</s>",
        ),
        Family(
            "gemma",
            GEMMA,
            "replace",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            bos="<bos>",
            eos="<eos>",
            roles=("user", "assistant"),
        ),
        Family(
            "deepseek",
            DEEPSEEK,
            "byte-level",
            DEEPSEEK_TOKENS,
            ("<think>", "</think>"),
            bos=DEEPSEEK_TOKENS[0],
            eos=DEEPSEEK_TOKENS[1],
        ),
        Family(
            "phi",
            PHI,
            "byte-level",
            ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
            eos="<|endoftext|>",
            rstrip=True,
        ),
    )
}


def write_family(family: Family, folder: Path, texts: list[str]) -> Path:
    """A tokenizer folder for the family: tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(_trained(family.kind, tuple(texts)))
    added = tokenizer["added_tokens"]
    number = 1 + max(
        [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added)], default=-1
    )
    for content in (*family.special, *family.added):
        if any(token["content"] == content for token in added):
            continue
        known = tokenizer["model"]["vocab"].get(content)
        added.append(
            {
                "id": number if known is None else known,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": family.rstrip,
                "normalized": False,
                "special": content in family.special,
            }
        )
        number += known is None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"chat_template": family.template, "eos_token": family.eos}
    if family.bos:
        config["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def _trained(kind: str, texts: tuple[str, ...]) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    byte_level = kind in ("byte-level", "nfc")
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, fuse_unk=not byte_level))
    special: list[str] = []
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        if kind == "nfc":
            tokenizer.normalizer = normalizers.NFC()
    else:
        alphabet = []
        special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        replace = normalizers.Replace(" ", "\u2581")
        if kind == "prepend":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        elif kind == "replace":
            tokenizer.normalizer = replace
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=alphabet,
        max_token_length=12,
        show_progress=False,
    )
    lines = [line + "\n" for text in texts for line in text.splitlines()]
    tokenizer.train_from_iterator(lines, trainer)
    content = json.loads(tokenizer.to_str())
    # Byte pieces belong to the model alone; only <unk> is an added token.
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] == "<unk>"]
    if not byte_level:
        content["model"]["unk_token"] = "<unk>"
    return json.dumps(content)
