"""Request bodies: strict types, ranges, and a list of fields that are refused instead of quietly ignored.

Fields that are not known are ignored, as other servers do: clients send `user`, `metadata`, `store` and the like.
"""

from dataclasses import dataclass, field
from typing import Any

from serving.api.errors import invalid
from serving.api.fields import Fields, parse_json
from serving.api.limits import Limits
from serving.api.messages import ImagePart, Message, read_messages
from serving.api.tools import Tools, read_switches, read_tools, strings
from serving.protocol import MAX_CHOICES, MAX_LOGPROBS, InvalidRequest, SamplingParams
from serving.stream import TextOptions

# Field -> values that ask for nothing special, and so are fine. Null always is. Accepting any other and going on
# would change the answer without a word.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "modalities": (["text"],),
    "audio": (),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
}
ONLY_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"echo": (False,)}
ONLY_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
}
# Stands for "as many as there is room for" until the room is known.
_UNBOUND = 1 << 31


@dataclass(frozen=True)
class Options:
    """What chats and completions share. `max_tokens` None: as many as the context has room for. `cache_salt`: see
    Submission."""

    model: str | None
    max_tokens: int | None
    sampling: SamplingParams  # its max_tokens only counts once the prompt's length is known
    text: TextOptions
    n: int
    stream: bool
    include_usage: bool
    running_usage: bool
    echo: bool = False
    tokens_as_ids: bool = False
    cache_salt: str = ""

    @property
    def score_only(self) -> bool:
        """Nothing is to be generated; only the prompt is asked about."""
        return self.max_tokens == 0


@dataclass(frozen=True)
class ChatRequest:
    """`switches` are those of the chat template that the client set."""

    messages: tuple[Message, ...]
    options: Options
    tools: Tools = field(default_factory=Tools)
    switches: dict[str, Any] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Every text that a client chose and the template may show."""
        declared = [text for tool in self.tools.declared for text in strings(tool)]
        return declared + [text for message in self.messages for text in message.texts()]

    def images(self) -> list[ImagePart]:
        return [part for message in self.messages for part in message.parts if isinstance(part, ImagePart)]


@dataclass(frozen=True)
class CompletionRequest:
    """`prompts` are texts, or token ids to be used as they are."""

    prompts: tuple[str | list[int], ...]
    options: Options


def parse_chat(raw: bytes, limits: Limits) -> ChatRequest:
    """The body of a chat.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(parse_json(raw, limits.max_body_values))
    fields.refuse(REFUSED | ONLY_IN_COMPLETIONS)
    options = _options(fields, limits, _chat_logprobs(fields))
    messages = read_messages(fields.required("messages"), limits)
    request = ChatRequest(messages, options, read_tools(fields), read_switches(fields))
    images = request.images()
    if len(images) > limits.max_images:
        raise invalid(
            f"{len(images)} images in one request: the limit is {limits.max_images}; send fewer",
            images[limits.max_images].param,
        )
    _check_length(sum(map(len, request.texts())), "messages", limits)
    return request


def parse_completion(raw: bytes, limits: Limits) -> CompletionRequest:
    """The body of a completion.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(parse_json(raw, limits.max_body_values))
    fields.refuse(REFUSED | ONLY_IN_CHATS)
    echo = fields.boolean("echo")
    logprobs = None if fields.get("logprobs") is False else fields.integer("logprobs")
    options = _options(fields, limits, logprobs, echo=echo)
    prompt = fields.required("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if many else [prompt]
    if len(prompts) > limits.max_prompts:
        raise invalid(f"{len(prompts)} prompts: the limit is {limits.max_prompts}; send fewer", "prompt")
    for one in prompts:
        ids = isinstance(one, list) and all(type(token_id) is int for token_id in one)
        if not (isinstance(one, str) or ids):
            raise invalid("prompt must be a string or a list of token ids, or a list of these", "prompt")
        if not one:
            raise invalid("prompt is empty; send at least one character or token", "prompt")
    _check_length(sum(map(len, prompts)), "prompt", limits)
    return CompletionRequest(tuple(prompts), options)


def _chat_logprobs(fields: Fields) -> int | None:
    """Alternatives to tell with each token of a chat, None for telling nothing."""
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted and top:
        raise invalid(f"top_logprobs is {top}; it only goes with logprobs: true", "top_logprobs")
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid(f"top_logprobs is {top}; it must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
    return top if wanted else None


def _options(fields: Fields, limits: Limits, logprobs: int | None, *, echo: bool = False) -> Options:
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise invalid("stream_options only goes with stream: true", "stream_options")
    max_tokens = _max_tokens(fields, least=0 if echo else 1)
    n = fields.integer("n")
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n is {n}; it must be from 1 to {MAX_CHOICES}", "n")
    top_k = fields.integer("top_k")
    try:
        sampling = SamplingParams(
            max_tokens=_UNBOUND if max_tokens is None else max(max_tokens, 1),
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            seed=fields.integer("seed"),
            ignore_eos=fields.boolean("ignore_eos"),
            top_k=0 if top_k in (None, -1) else top_k,
            min_p=fields.number("min_p", 0.0),
            presence_penalty=fields.number("presence_penalty", 0.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0),
            repetition_penalty=fields.number("repetition_penalty", 1.0),
            logit_bias=_logit_bias(fields, limits),
            min_tokens=fields.integer("min_tokens") or 0,
            stop_token_ids=_stop_token_ids(fields, limits),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        )
    except InvalidRequest as error:
        field, _ = str(error).split(" ", 1)  # its texts begin with the field's name
        raise invalid(str(error), field) from None
    return Options(
        model=fields.text("model"),
        max_tokens=max_tokens,
        sampling=sampling,
        text=TextOptions(
            stop=_stops(fields.get("stop"), limits),
            include_stop=fields.boolean("include_stop_str_in_output"),
            special=fields.get("skip_special_tokens") is not None and not fields.boolean("skip_special_tokens"),
            min_tokens=sampling.min_tokens,
        ),
        n=1 if n is None else n,
        stream=stream,
        include_usage=stream_options is not None and stream_options.boolean("include_usage"),
        running_usage=stream_options is not None and stream_options.boolean("continuous_usage_stats"),
        echo=echo,
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        cache_salt=_cache_salt(fields),
    )


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt")
    if salt == "":
        raise invalid("cache_salt is empty, which keeps nothing apart; send a text or leave it out", "cache_salt")
    return salt or ""


def _logit_bias(fields: Fields, limits: Limits) -> tuple[tuple[int, float], ...]:
    bias = fields.object("logit_bias")
    if bias is None:
        return ()
    names = bias.names()
    if len(names) > limits.max_logit_bias:
        raise invalid(
            f"logit_bias of {len(names)} tokens: the limit is {limits.max_logit_bias}; send fewer", "logit_bias"
        )
    for key in names:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid(f"logit_bias has the key {key[:40]!r}; keys are token ids", "logit_bias")
    return tuple((int(key), bias.number(key, 0.0)) for key in names)


def _stop_token_ids(fields: Fields, limits: Limits) -> tuple[int, ...]:
    ids = fields.get("stop_token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise invalid("stop_token_ids must be a list of token ids", "stop_token_ids")
    if len(ids) > limits.max_stop_token_ids:
        raise invalid(
            f"{len(ids)} stop_token_ids: the limit is {limits.max_stop_token_ids}; send fewer", "stop_token_ids"
        )
    return tuple(ids)


def _max_tokens(fields: Fields, least: int) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
    value, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    if value is not None and value < least:
        raise invalid(f"{name} is {value}; it must be at least {least}", name)
    return value


def _stops(value: Any, limits: Limits) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop must be a string or a list of strings", "stop")
    if len(stops) > limits.max_stop:
        raise invalid(f"{len(stops)} stop strings: the limit is {limits.max_stop}; send fewer", "stop")
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise invalid(f"stop string of {len(stop)} characters: it must have 1 to {limits.max_stop_chars}", "stop")
    return tuple(stops)


def _check_length(characters: int, param: str, limits: Limits) -> None:
    if characters > limits.max_text_chars:
        raise invalid(
            f"prompt of {characters} characters: the limit is {limits.max_text_chars}; shorten it",
            param,
            "context_length_exceeded",
        )
