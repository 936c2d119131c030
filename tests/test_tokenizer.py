"""Encoding against llama.cpp's, chat templates against transformers', decoding a token at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jbatch.tokenizer import BYTE_OF, PRE_TOKENIZERS, Detokenizer, Tokenizer, byte_level_bpe

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizer.json").read_text("utf-8"))
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTE_OF, "he", "ll", "hell", "Ġt", "ðŁ", "ĻĤ", "<tool>"]
MERGES = ["h e", "l l", "he ll", "Ġ t", "ð Ł", "Ļ Ĥ"]


def byte_level(pre: str = "smollm", template: str | None = None, **options) -> Tokenizer:
    """A small tokenizer of the GPT-2 kind."""
    backend = byte_level_bpe(TOKENS, MERGES, pre=pre, special=SPECIAL, added=["<tool>"], **options)
    return Tokenizer(backend, eos_ids=frozenset({1}), bos_token=SPECIAL[0], chat_template=template)


def byte_fallback() -> Tokenizer:
    """A small tokenizer of the SentencePiece kind, as Llama 2, TinyLlama and Mistral have."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "a", "b", "▁▁", "é", "🙂", "\N{REPLACEMENT CHARACTER}"]
    backend = tokenizers.Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos_ids=frozenset({2}))


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    some_id = st.integers(0, tokenizer.vocab_size + 3)  # a model's vocabulary may be padded
    ids = data.draw(st.lists(st.one_of(some_id, st.text(max_size=3).map(tokenizer.encode)), max_size=20))
    flat = [index for item in ids for index in (item if isinstance(item, list) else [item])]
    assert "".join(stream(tokenizer, flat)) == tokenizer.decode(flat)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=30))
def test_no_piece_ends_within_a_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    pieces = stream(tokenizer, tokenizer.encode(text))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer = TOKENIZERS["byte level"]
    smile = [tokenizer.backend.token_to_id(token) for token in ("ðŁ", "ĻĤ")]
    hell = tokenizer.backend.token_to_id("hell")
    assert stream(tokenizer, [hell, smile[0], smile[1], 0, hell]) == ["hell", "", "🙂", "", "hell", ""]
    assert stream(tokenizer, [smile[0]]) == ["", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_streaming_work_is_linear(kind, monkeypatch):
    tokenizer = TOKENIZERS[kind]
    decoded = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.extend(ids) or Tokenizer.decode(tokenizer, ids))
    for index in (tokenizer.vocab_size - 1, *tokenizer.encode("a\x80\xff"), tokenizer.vocab_size + 1):
        decoded.clear()
        stream(tokenizer, [index] * 1000)
        assert len(decoded) < 5000


@pytest.mark.parametrize("pair", GOLDENS["pairs"], ids=lambda pair: repr(pair["text"][:20]))
def test_encodes_as_llama_cpp_does(smollm2, pair):
    assert smollm2.tokenizer.encode(pair["text"]) == pair["ids"]


def test_decodes_what_it_encoded(smollm2):
    for pair in GOLDENS["pairs"]:
        if "<" not in pair["text"]:
            assert smollm2.tokenizer.decode(pair["ids"]) == pair["text"]
            assert "".join(stream(smollm2.tokenizer, pair["ids"])) == pair["text"]


@pytest.mark.parametrize("chat", GOLDENS["chats"])
def test_renders_chats_as_transformers_does(smollm2, chat):
    add = chat["add_generation_prompt"]
    assert smollm2.tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=add) == chat["text"]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat["messages"]]
    assert smollm2.tokenizer.apply_chat_template(parts, add_generation_prompt=add) == chat["text"]


def test_end_of_sequence(smollm2):
    assert smollm2.tokenizer.eos_ids == {2}
    assert smollm2.tokenizer.vocab_size == smollm2.config.vocab_size == 49152


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " bc", " 1234", "'ll", " ?!", "  ", " d"]),
        ("smollm", ["a", " bc", " ", "1", "2", "3", "4", "'ll", " ?!", "  ", " d"]),
        ("llama-bpe", ["a", " bc", " ", "123", "4", "'ll", " ?!", "  ", " d"]),
        ("qwen2", ["a", " bc", " ", "1", "2", "3", "4", "'ll", " ?!", "  ", " d"]),
    ],
)
def test_pre_tokenizers(pre, pieces):
    splits = byte_level(pre).backend.pre_tokenizer.pre_tokenize_str("a bc 1234'll ?!   d")
    assert [bytes(BYTE_OF[char] for char in piece).decode() for piece, _ in splits] == pieces
    assert pre in PRE_TOKENIZERS


def test_special_and_added_tokens():
    tokenizer = byte_level(prefix=SPECIAL[0])
    tool = tokenizer.backend.token_to_id("<tool>")
    assert tokenizer.encode("<|im_end|><tool>") == [1, tool]
    assert tokenizer.encode("<tool>", add_special=True) == [0, tool]
    assert tokenizer.decode([1, tool]) == "<tool>"


@pytest.mark.parametrize(
    ("tokens", "merges", "pre", "says"),
    [
        (["a"], [], "unknown", "'unknown'"),
        (["a", "a"], [], "gpt-2", "twice"),
        (["a"], ["a b"], "gpt-2", "merges"),
        (["a"], ["a"], "gpt-2", "merges"),
    ],
)
def test_refused_vocabularies(tokens, merges, pre, says):
    with pytest.raises(ValueError, match=says):
        byte_level_bpe(tokens, merges, pre=pre)


def test_saved_and_loaded(tmp_path):
    saved = byte_level(template="{{ bos_token }}é")
    saved.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.backend.to_str() == saved.backend.to_str()
    assert loaded.apply_chat_template([]) == saved.apply_chat_template([]) == "<|im_start|>é"
    assert (loaded.eos_ids, loaded.eos_token) == (saved.eos_ids, saved.eos_token)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", '[{"name": "<é>"}]'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "name": "<é>"\n }\n]'),
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}", "  user\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_rely_on(template, text):
    tokenizer = byte_level(template=template)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "<é>"}]) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('two\nlines') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        None,
    ],
)
def test_bad_templates_fail_in_one_line(template):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        byte_level(template=template).apply_chat_template([{"role": "user", "content": "x"}])


def test_images_are_refused():
    with pytest.raises(ValueError, match="text only"):
        byte_level(template="").apply_chat_template([{"role": "user", "content": [{"type": "image_url"}]}])


def test_imports_no_jax():
    code = "import sys, jbatch.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
