"""Text to token ids and back: encoding, chat templates, incremental decoding. Imports no jax."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-pair encoding: by each pattern in turn.

    `whole_words` looks a piece up in the vocabulary before it merges anything.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False


# By GGUF's name (`tokenizer.ggml.pre`); the patterns are those of llama.cpp's src/llama-vocab.cpp.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "llama-bpe": PreTokenizer((LLAMA3,), whole_words=True),
    "qwen2": PreTokenizer((LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), nfc=True),
}


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Iterable[str],
    *,
    pre: str,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    prefix: str = "",
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer from a GGUF's vocabulary.

    Args:
      tokens: each id's token, in GPT-2's printable form of bytes.
      merges: "left right" pairs, most important first.
      pre: a name in `PRE_TOKENIZERS`.
      special: tokens that are matched before anything else and are left out of decoded text.
      added: tokens that are matched before anything else and are decoded as text.
      prefix: a token to put in front of every encoding that asks for special tokens; "" for none.

    Raises:
      ValueError: `pre` is unknown, or vocabulary and merges do not fit each other.
    """
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"the pre-tokenizer {pre!r} is not one of {', '.join(sorted(PRE_TOKENIZERS))}")
    rules = PRE_TOKENIZERS[pre]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("a token occurs twice in its vocabulary")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.whole_words)
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"its merges do not fit its vocabulary ({error})") from None
    backend = tokenizers.Tokenizer(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    if prefix:
        backend.post_processor = processors.TemplateProcessing(
            single=[prefix, "$A"], special_tokens=[(prefix, vocabulary[prefix])]
        )
    return backend


class Tokenizer:
    """A model's tokenizer with its end-of-sequence ids and chat template.

    Args:
      backend: the tokenizer proper.
      eos_ids: token ids that end a reply.
      bos_token, eos_token: the strings chat templates refer to.
      chat_template: Jinja source, or None where the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int],
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.eos_ids = eos_ids
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # No token of a prompt stands for more characters: a byte-level token has one for each byte.
        self.longest_token = max(map(len, vocabulary), default=0)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read what `save` wrote. Raises OSError, ValueError, KeyError or TypeError if it is damaged."""
        text = (directory / "tokenizer.json").read_text("utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the Rust side raises bare Exception
            raise ValueError(f"tokenizer.json: {error}") from None
        extra = json.loads((directory / "tokenizer_extra.json").read_text("utf-8"))
        return cls(backend, eos_ids=frozenset(extra.pop("eos_ids")), **extra)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_extra.json` into `directory`."""
        (directory / "tokenizer.json").write_text(self.backend.to_str(), "utf-8")
        extra = {
            "eos_ids": sorted(self.eos_ids),
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "chat_template": self.chat_template,
        }
        (directory / "tokenizer_extra.json").write_text(json.dumps(extra), "utf-8")

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of `text`. Control tokens written out in it become their ids.

        `add_special` also adds what the model wants around a text, such as a begin-of-sequence token;
        rendered chats carry their own.
        """
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render a chat as the prompt the model was trained on.

        Args:
          messages: each with a "role" and a "content" (a string, or a list of {"type": "text", "text": ...}).
          add_generation_prompt: end with the opening of the assistant's reply.
          kwargs: further variables of the template, such as `tools`.

        Raises:
          ValueError: no template, or the template rejects the messages. One line.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: send a plain prompt instead")
        variables = {"bos_token": self.bos_token, "eos_token": self.eos_token} | kwargs
        flat = [{**message, "content": join_parts(message.get("content"))} for message in messages]
        try:
            return self._template.render(messages=flat, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template is a program: it may fail in any way
            text = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the model's chat template rejects these messages: {text[:300]}") from None

    @cached_property
    def _template(self) -> jinja2.Template:
        return chat_environment().from_string(self.chat_template or "")

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether text is the UTF-8 decoding of the tokens' bytes laid end to end."""
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def token_bytes(self, index: int) -> bytes:
        """The bytes a byte-level token stands for; none for special tokens and unused ids."""
        token = None if index in self.special_ids else self.backend.id_to_token(index)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[char] for char in token)
        except KeyError:
            return token.encode()


class Detokenizer:
    """Turns a stream of token ids into text, a piece at a time.

    All that `push` and `flush` return, put together, is `tokenizer.decode` of all the ids; no piece
    ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._told = ""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often none in the middle of a character."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        # Byte tokens are decoded as one run, valid or not as a whole: wait for its end.
        if token.startswith("<0x"):
            return ""
        return self._advance(whole=token.endswith("\N{REPLACEMENT CHARACTER}"))

    def flush(self) -> str:
        """The rest, at the end of the stream."""
        return self._utf8.decode(b"", final=True) + self._advance(whole=True)

    def _advance(self, whole: bool) -> str:
        """The window's text that is not told yet; its first part only gives the rest its context.

        Unless the window is known to be `whole`, a replacement character at its end is half a character.
        """
        text = self._tokenizer.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not whole:
            return ""
        new = text[len(self._told) :]
        self._window = self._window[-1:] if new else self._window
        self._told = self._tokenizer.decode(self._window)
        return new


def join_parts(content: Any) -> Any:
    """A message's content as a string, where it is a list of text parts. Raises ValueError for others."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("this model reads text only: every part of a message must be of type 'text'")
    return "".join(str(part.get("text", "")) for part in content)


def chat_environment() -> jinja2.Environment:
    """Jinja by Hugging Face's conventions for chat templates; sandboxed, since these are foreign code."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> NoReturn:
    """What templates call to reject a conversation."""
    raise jinja2.TemplateError(message)


def _byte_of() -> dict[str, int]:
    """The byte behind each character of GPT-2's printable alphabet."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of()
