"""Bodies of requests and responses, named as in OpenAI's API. Fields nobody knows are ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from jbatch.request import INT32_MAX, Request, RequestError, SamplingParams

Reason = Literal["stop", "length"]


def _must_be(what: str) -> WrapValidator:
    """One sentence in place of an error for each member of a union."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {what}") from None

    return WrapValidator(check)


class Body(BaseModel):
    """Part of a request. Raises for fields we know and do not serve yet, rather than ignore what they ask for."""

    model_config = ConfigDict(strict=True)
    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields not served, each with the values, besides null, that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, nothing in cls.not_yet.items():
                if data.get(name) not in (None, *nothing):
                    raise RequestError(f"{name} is not supported yet: leave it out", name)
        return data


# ---- requests ----


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationRequest(Body):
    """What both completion endpoints take."""

    not_yet = {
        "n": (1,),
        "best_of": (1,),
        "stop": ("", []),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_tokens": (0,),
        "structured_outputs": (),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids"), ()),
        **dict.fromkeys(("bad_words", "prompt_logprobs", "truncate_prompt_tokens", "length_penalty"), ()),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "response_format": ({"type": "text"},),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    tenant: str | None = Field(default=None, max_length=1024)
    program: str | None = Field(default=None, max_length=1024)
    deadline: float | None = None
    pin_seconds: float | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def engine_request(self, prompt: list[int], max_tokens: int) -> Request:
        """The request for one prompt. Raises `RequestError`."""
        plain = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
        given = {name: getattr(self, name) for name in plain if getattr(self, name) is not None}
        if self.top_k == -1:  # vLLM's way to keep all
            given["top_k"] = 0
        stops = tuple(self.stop_token_ids or ())
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, **given)
        return Request(
            tuple(prompt),
            sampling,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            tenant=self.tenant or "",
            program=self.program or "",
            deadline=self.deadline,
            pin_seconds=self.pin_seconds or 0.0,
        )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    not_yet = {**GenerationRequest.not_yet, "logprobs": (), "echo": (False,), "suffix": ("",)}

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        _must_be("a text, a list of texts, a list of token ids, or a list of such lists"),
    ]


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat."""

    not_yet = {"tool_calls": ([],), "function_call": ()}

    role: str
    content: Annotated[str | list[TextPart], _must_be("a text, or a list of parts of type 'text'")]
    name: str | None = None


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    not_yet = {
        **GenerationRequest.not_yet,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "modalities": (["text"],),
        "audio": (),
        "echo": (False,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
    }

    messages: list[Message]
    max_completion_tokens: int | None = None


# ---- responses ----


class PromptTokensDetails(BaseModel):
    """Tokens of all prompts that were in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and all replies; a token that ended a reply counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextChoice(BaseModel):
    """One reply of a text completion, or a piece of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: Reason | None


class TextCompletion(BaseModel):
    """A text completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    """The reply of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One reply of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: Reason | None


class ChatCompletion(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatDelta(BaseModel):
    """What a chunk adds to the reply."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one reply."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: Reason | None


class ChatChunk(BaseModel):
    """A chunk of a chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jbatch"
    max_model_len: int


class ModelList(BaseModel):
    """All models there are."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
