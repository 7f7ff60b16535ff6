"""Request bodies: strict types, ranges, and a list of fields that are refused instead of quietly ignored.

Written by hand: the two bodies have a dozen fields between them, every fault has to be a 400 in our own shape with the
field's name, and the strictness wanted here (no "1" for 1, no true for 1, null means absent) is what a general library
would have to be talked into.

Fields that are not known are ignored, as other servers do: clients send `user`, `metadata`, `store` and the like.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serving.api.errors import ApiError, invalid, unsupported
from serving.api.limits import Limits
from serving.api.media import data_uri_payload
from serving.protocol import InvalidRequest, SamplingParams

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Field -> values that ask for nothing special, and so are fine. Null always is. Accepting any other and going on
# would change the answer without a word.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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
    "chat_template_kwargs": ({},),
    "reasoning_effort": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
_MESSAGE_REFUSED: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
}


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """`payload` is base64 text; `param` names the part in errors."""

    payload: str
    param: str


Part = TextPart | ImagePart


@dataclass(frozen=True)
class Message:
    """One turn. `plain` is set when the content came as a string: some templates treat the two forms differently."""

    role: Role
    parts: tuple[Part, ...]
    plain: bool


@dataclass(frozen=True)
class Options:
    """What chats and completions share. `max_tokens` None: as many as the context has room for."""

    model: str | None
    max_tokens: int | None
    sampling: SamplingParams  # its max_tokens only counts once the prompt's length is known
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    options: Options

    def texts(self) -> list[str]:
        return [part.text for message in self.messages for part in message.parts if isinstance(part, TextPart)]

    def images(self) -> list[ImagePart]:
        return [part for message in self.messages for part in message.parts if isinstance(part, ImagePart)]


@dataclass(frozen=True)
class CompletionRequest:
    """`prompt` is text, or token ids to be used as they are."""

    prompt: str | list[int]
    options: Options


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: 400: not UTF-8, not strict JSON (NaN and Infinity are not), not an object, or text that UTF-8 cannot
            carry.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in raw:  # only an escape can smuggle in half of a surrogate pair
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise invalid("the body is not valid UTF-8 text (or holds half of a surrogate pair)") from None
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply; flatten it") from None
    except ValueError:  # a number of thousands of digits, or one of the constants
        raise invalid("the body holds a number that JSON does not allow (NaN, Infinity or too many digits)") from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, not {_kind(body)}")
    return body


def parse_chat(raw: bytes, limits: Limits) -> ChatRequest:
    """The body of a chat.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(parse_json(raw))
    fields.refuse(_REFUSED)
    options = _options(fields, limits)
    entries = fields.required("messages")
    if not isinstance(entries, list):
        raise invalid(f"messages must be a list, not {_kind(entries)}", "messages")
    if not entries:
        raise invalid("messages is empty; send at least one", "messages")
    if len(entries) > limits.max_messages:
        raise invalid(f"{len(entries)} messages: the limit is {limits.max_messages}; send fewer", "messages")
    request = ChatRequest(tuple(_message(entry, k, limits) for k, entry in enumerate(entries)), options)
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
    fields = Fields(parse_json(raw))
    fields.refuse(_REFUSED)
    options = _options(fields, limits)
    prompt = fields.required("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise unsupported("prompt", f"{len(prompt)} prompts in one request: send one prompt a request")
        prompt = prompt[0]
    if isinstance(prompt, str):
        _check_length(len(prompt), "prompt", limits)
    elif not (isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)):
        raise invalid("prompt must be a string or a list of token ids (or a list of one of these)", "prompt")
    if not prompt:
        raise invalid("prompt is empty; send at least one character or token", "prompt")
    return CompletionRequest(prompt, options)


class Fields:
    """Typed reading of one JSON object. Null counts as absent. `where` is put before names in errors."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values = values
        self._where = where

    def name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    def get(self, field: str) -> Any:
        return self._values.get(field)

    def required(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            raise invalid(f"{self.name(field)} is missing", self.name(field))
        return value

    def integer(self, field: str) -> int | None:
        value = self.get(field)
        if value is not None and type(value) is not int:
            raise self._wrong(field, "an integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self._wrong(field, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise invalid(f"{self.name(field)} is too large for a number", self.name(field))
        return number

    def boolean(self, field: str) -> bool:
        value = self.get(field)
        if value is None:
            return False
        if type(value) is not bool:
            raise self._wrong(field, "true or false")
        return value

    def text(self, field: str) -> str | None:
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise self._wrong(field, "a string")
        return value

    def object(self, field: str) -> "Fields | None":
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(field, "an object")
        return Fields(value, self.name(field))

    def refuse(self, refused: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise if a field of the list is there with a value that asks for something."""
        for field, harmless in refused.items():
            value = self.get(field)
            if value is not None and not any(_same(value, accepted) for accepted in harmless):
                raise unsupported(self.name(field), f"{self.name(field)} is not supported by this server; leave it out")

    def _wrong(self, field: str, wanted: str) -> ApiError:
        return invalid(f"{self.name(field)} must be {wanted}, not {_kind(self.get(field))}", self.name(field))


def _options(fields: Fields, limits: Limits) -> Options:
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise invalid("stream_options only goes with stream: true", "stream_options")
    max_tokens = _max_tokens(fields)
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens or 1,
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            seed=fields.integer("seed"),
            ignore_eos=fields.boolean("ignore_eos"),
        )
    except InvalidRequest as error:
        field, _ = str(error).split(" ", 1)  # its texts begin with the field's name
        raise invalid(str(error), field) from None
    return Options(
        model=fields.text("model"),
        max_tokens=max_tokens,
        sampling=sampling,
        stop=_stops(fields.get("stop"), limits),
        stream=stream,
        include_usage=stream_options is not None and stream_options.boolean("include_usage"),
    )


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
    value, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    if value is not None and value < 1:
        raise invalid(f"{name} is {value}; it must be at least 1", name)
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


def _message(entry: Any, index: int, limits: Limits) -> Message:
    where = f"messages[{index}]"
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object, not {_kind(entry)}", where)
    fields = Fields(entry, where)
    role = _ROLES.get(fields.text("role") or "")
    if role is None:
        raise invalid(f"{where}.role must be one of {', '.join(_ROLES)}; tools are not supported", f"{where}.role")
    fields.refuse(_MESSAGE_REFUSED)
    content = fields.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        return Message(role, (TextPart(content),), plain=True)
    if not isinstance(content, list):
        raise invalid(f"{where}.content must be a string or a list of parts, not {_kind(content)}", f"{where}.content")
    if not content:
        raise invalid(f"{where}.content is empty; send at least one part", f"{where}.content")
    parts = tuple(_parts(content, f"{where}.content", limits))
    if role != "user" and any(isinstance(part, ImagePart) for part in parts):
        raise invalid(f"{where}: images may only be in user messages", f"{where}.content")
    return Message(role, parts, plain=False)


def _parts(content: list[Any], where: str, limits: Limits) -> Iterator[Part]:
    for k, entry in enumerate(content):
        param = f"{where}[{k}]"
        if not isinstance(entry, dict):
            raise invalid(f"{param} must be an object, not {_kind(entry)}", param)
        fields = Fields(entry, param)
        match fields.text("type"):
            case "text" | "input_text":
                fields.required("text")
                yield TextPart(fields.text("text") or "")
            case "image_url" | "input_image":
                yield ImagePart(data_uri_payload(_image_uri(fields), param, limits), param)
            case _:
                raise invalid(f"{param}.type must be text, image_url or input_image", f"{param}.type")


def _image_uri(fields: Fields) -> str:
    """`image_url` is a string in one dialect and an object with `url` in the other. `detail` has no meaning here."""
    value = fields.required("image_url")
    if isinstance(value, str):
        return value
    inner = fields.object("image_url")
    assert inner is not None
    inner.required("url")
    return inner.text("url") or ""


def _check_length(characters: int, param: str, limits: Limits) -> None:
    if characters > limits.max_text_chars:
        raise invalid(
            f"prompt of {characters} characters: the limit is {limits.max_text_chars}; shorten it",
            param,
            "context_length_exceeded",
        )


def _same(value: Any, accepted: Any) -> bool:
    """Equal, where true is not 1, but 1.0 is."""
    return (type(value) is bool) == (type(accepted) is bool) and value == accepted


def _kind(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _refuse_constant(name: str) -> float:
    raise ValueError(name)
