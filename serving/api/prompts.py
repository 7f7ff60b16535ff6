"""Parsed requests to what the engine takes: token ids, image spans and sampling parameters. Runs in worker threads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.api.errors import ApiError, invalid, unsupported
from serving.api.limits import Limits
from serving.api.messages import ImagePart, Message, TextPart
from serving.api.schemas import ChatRequest, Options
from serving.api.tools import SWITCHES
from serving.chat import ChatTemplate, Shield, TemplateFault
from serving.chat.parser import Opening
from serving.chat.parsers import opening_of
from serving.protocol import ImageSpan, PreparedImage, SamplingParams
from serving.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids with every image's placeholder expanded, where each image sits, and what the end left open."""

    ids: list[int]
    images: tuple[ImageSpan, ...]
    opening: Opening = "content"

    @property
    def image_tokens(self) -> int:
        return sum(span.image.num_tokens for span in self.images)


def chat_prompt(
    request: ChatRequest,
    images: Sequence[PreparedImage],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    max_model_len: int,
) -> Prompt:
    """Render and tokenise a chat. `images` are those of the request, in order.

    Raises:
        ApiError: 400: the template refused the chat or does not place each image once, or the text is far over
            `max_model_len` tokens.
    """
    _check_template(request, template)
    try:
        shield = Shield(tokenizer.added_initials, request.texts())
    except TemplateFault as error:
        raise invalid(str(error), "messages") from None
    messages = [_template_message(message, shield, template) for message in request.messages]
    tools = [_hidden(tool, shield) for tool in request.tools.declared]
    try:
        rendered = template.render(messages, tools=tools, **request.switches)
    except TemplateFault as error:
        raise invalid(shield.restore(str(error)), "messages") from None
    _check_far_over(shield.restore(rendered), tokenizer, max_model_len)
    prompt = expand_images(tokenizer.encode_rendered(rendered, shield.restore), images, tokenizer.image_token_id)
    return replace(prompt, opening=opening_of(rendered))


def _check_template(request: ChatRequest, template: ChatTemplate) -> None:
    """Refuse what the template would pass over without a word."""
    if request.tools.declared and not template.takes_tools:
        raise unsupported("tools", "this model's chat template takes no tools; leave them out")
    for name in request.switches:
        if name not in template.variables:
            known = ", ".join(sorted(template.variables & SWITCHES)) or "none"
            param = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
            raise unsupported(param, f"this model's chat template does not read {name}; those it reads: {known}")


def _template_message(message: Message, shield: Shield, template: ChatTemplate) -> dict[str, Any]:
    return {"role": message.role, "content": _template_content(message, shield, template)} | _hidden(
        _extras(message), shield
    )


def _template_content(message: Message, shield: Shield, template: ChatTemplate) -> str | list[dict[str, Any]]:
    texts = [shield.hide(part.text) for part in message.parts if isinstance(part, TextPart)]
    has_image = any(isinstance(part, ImagePart) for part in message.parts)
    if message.plain or not (template.takes_parts or has_image):
        return "\n".join(texts)
    return [
        {"type": "text", "text": shield.hide(part.text)} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.parts
    ]


def _extras(message: Message) -> dict[str, Any]:
    """What only some turns have; a key that says nothing is left out, because templates test for its presence."""
    calls = [
        {
            **({"id": call.id} if call.id is not None else {}),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.calls
    ]
    extras = {"tool_call_id": message.call_id, "name": message.name, "reasoning_content": message.reasoning}
    return {key: value for key, value in extras.items() if value is not None} | ({"tool_calls": calls} if calls else {})


def _hidden(value: Any, shield: Shield) -> Any:
    """A JSON value with every text in it hidden."""
    if isinstance(value, str):
        return shield.hide(value)
    if isinstance(value, dict):
        return {shield.hide(key): _hidden(inner, shield) for key, inner in value.items()}
    return [_hidden(inner, shield) for inner in value] if isinstance(value, list) else value


def expand_images(ids: list[int], images: Sequence[PreparedImage], image_token_id: int | None) -> Prompt:
    """Replace the placeholder of each image, in order, by as many as the image has tokens.

    ```
    ids     a  b  <img>  c  <img>  d          images of 3 and 2 tokens
    prompt  a  b  <img> <img> <img>  c  <img> <img>  d
    spans         [2, 5)                [6, 8)
    ```

    Raises:
        ApiError: 400: not exactly one placeholder an image.
    """
    found = ids.count(image_token_id) if image_token_id is not None else 0
    if found != len(images):
        raise invalid(
            f"the chat template placed {found} images, the messages hold {len(images)}; "
            "this model's template may not take images where they were sent",
            "messages",
        )
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    remaining = iter(images)
    for token_id in ids:
        if token_id == image_token_id:
            image = next(remaining)
            spans.append(ImageSpan(len(expanded), image))
            expanded += [token_id] * image.num_tokens
        else:
            expanded.append(token_id)
    return Prompt(expanded, tuple(spans))


def completion_prompt(prompt: str | list[int], tokenizer: Tokenizer, max_model_len: int) -> Prompt:
    """Tokenise a raw prompt, or check token ids.

    Raises:
        ApiError: 400: an id outside the vocabulary, a placeholder of an image, or no room for an answer.
    """
    if isinstance(prompt, str):
        _check_far_over(prompt, tokenizer, max_model_len)
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise invalid("prompt has no tokens; send at least one", "prompt")
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise invalid(f"token id {token_id} is not in the vocabulary of {tokenizer.vocab_size}", "prompt")
        if token_id in tokenizer.reserved_ids:
            raise invalid(
                f"token {token_id} stands for an image or video; send images to /v1/chat/completions", "prompt"
            )
    if len(ids) >= max_model_len:  # now, and not when all prompts of the request are there
        raise _no_room(f"{len(ids)} tokens", max_model_len)
    return Prompt(list(ids), ())


def _check_far_over(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    if tokenizer.is_far_over(text, max_model_len):
        raise _no_room(f"more than {max_model_len} tokens", max_model_len)


def _no_room(length: str, max_model_len: int) -> ApiError:
    return invalid(
        f"the prompt has {length}, the context holds {max_model_len} and one has to be left for the answer; shorten "
        "the prompt or send fewer or smaller images",
        code="context_length_exceeded",
    )


def check_echo(options: Options, prompts: Sequence[Prompt], limits: Limits) -> None:
    """Raises ApiError 400 when too many log-probabilities of the prompts are asked for."""
    if options.sampling.prompt_logprobs is None:
        return
    tokens, each = sum(len(prompt.ids) for prompt in prompts), options.n * (1 + options.sampling.prompt_logprobs)
    if tokens * each > limits.max_echo_logprobs:
        raise invalid(
            f"echo and logprobs ask for {tokens * each} log-probabilities of {tokens} prompt tokens: the limit is "
            f"{limits.max_echo_logprobs}; send fewer prompts, or lower logprobs or n",
            "logprobs",
        )


def sampling_params(options: Options, prompt: Prompt, max_model_len: int, vocab_size: int) -> SamplingParams:
    """Sampling parameters, with `max_tokens` filled in from the room that the prompt leaves.

    Raises:
        ApiError: 400: the prompt, or the prompt and `max_tokens`, do not fit the context; a token id is not one.
    """
    sampling = options.sampling
    named = {"logit_bias": [i for i, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
    for field, ids in named.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise invalid(f"{field}: token id {token_id} is not in the vocabulary of {vocab_size}", field)
    length = len(prompt.ids)
    image_note = f" ({prompt.image_tokens} of them from images)" if prompt.images else ""
    room = max_model_len - length
    if room < 1:
        raise _no_room(f"{length} tokens{image_note}", max_model_len)
    if options.max_tokens is not None and options.max_tokens > room:
        raise invalid(
            f"the prompt has {length} tokens{image_note} and max_tokens is {options.max_tokens}, together more than "
            f"the context of {max_model_len}; lower max_tokens to {room} or shorten the prompt",
            "max_tokens",
            "context_length_exceeded",
        )
    if sampling.min_tokens > room:
        raise invalid(
            f"min_tokens is {sampling.min_tokens}, but the prompt leaves room for {room}; lower it", "min_tokens"
        )
    return replace(sampling, max_tokens=room if options.max_tokens is None else max(options.max_tokens, 1))
