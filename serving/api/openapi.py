"""The OpenAPI 3.1 document of the server: what each route takes and gives.

Written beside the parsers, which are the truth; tests hold the two together field by field. Limits come from where they
are enforced.
"""

from importlib import metadata
from typing import Any

from serving.api import schemas, tools
from serving.api.limits import Limits
from serving.protocol import LEAST_REPETITION, MAX_BIAS, MAX_CHOICES, MAX_LOGPROBS, MAX_TEMPERATURE

Json = dict[str, Any]

_INT64 = 1 << 63
_STOP_REASONS = ["stop", "length", "tool_calls", "abort"]


def document(limits: Limits, model: str) -> Json:
    """The document of a server of `model`."""
    chat = _ref("ChatRequest"), {"application/json": _media("ChatAnswer"), "text/event-stream": _events("ChatChunk")}
    text = (
        _ref("CompletionRequest"),
        {
            "application/json": _media("CompletionAnswer"),
            "text/event-stream": _events("CompletionChunk"),
        },
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vitstripe",
            "version": metadata.version("vitstripe"),
            "description": f"OpenAI-compatible serving of {model}. Unknown fields of a body are ignored; known fields "
            "that this server has no meaning for are refused unless they ask for nothing.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _generate("Answer a chat", *chat)},
            "/v1/completions": {"post": _generate("Continue a text", *text)},
            "/v1/models": {"get": _get("The model that is served", "Models", codes=(401, 500))},
            "/v1/models/{model}": {
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                "get": _get("The model, by its name", "Model", codes=(401, 404, 500)),
            },
            "/health": {"get": _get("Alive: the engine shows signs of life", "State", codes=(500, 503), open_=True)},
            "/ready": {"get": _get("Ready: requests are taken", "State", codes=(500, 503), open_=True)},
            "/health_generate": {
                "get": _get("The engine makes a token", "Probe", codes=(401, 429, 500, 503)),
            },
            "/metrics": {
                "get": {
                    "summary": "Counts for Prometheus",
                    "security": [],
                    "responses": {
                        "200": {
                            "description": "Prometheus' text format",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        **_errors(500),
                    },
                }
            },
            "/start_profile": {"post": _control("Begin a trace", "TraceStarted", codes=(400, 409, 413))},
            "/stop_profile": {"post": _control("End the trace and list its files", "TraceStopped", codes=(409,))},
            "/profile_status": {"get": _control("Which trace runs", "TraceStatus")},
        },
        "security": [{}, {"apiKey": []}],
        "components": {
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of the server's API keys, if it has any",
                },
                "adminKey": {"type": "http", "scheme": "bearer", "description": "The server's admin key"},
            },
            "schemas": {
                "ChatRequest": chat_request(limits),
                "CompletionRequest": completion_request(limits),
                **_ANSWERS,
            },
        },
    }


# Requests


def chat_request(limits: Limits) -> Json:
    """Schema of a chat's body."""
    fields = _common(limits) | {
        "messages": {"type": "array", "minItems": 1, "maxItems": limits.max_messages, "items": _message(limits)},
        "logprobs": _or_null({"type": "boolean"}),
        "top_logprobs": _number("integer", 0, MAX_LOGPROBS, "Goes with logprobs: true"),
        "tools": _or_null({"type": "array", "maxItems": tools.MAX_TOOLS, "items": _TOOL}),
        "tool_choice": {"enum": ["auto", "none", None]},
        "parallel_tool_calls": _or_null({"type": "boolean"}),
        "reasoning_effort": {
            "enum": [*tools.EFFORTS, None],
            "description": "Refused by models whose chat template does not read it",
        },
        "chat_template_kwargs": _or_null(
            {
                "type": "object",
                "properties": {name: _or_null({"type": "boolean"}) for name in tools.SWITCH_NAMES},
                "additionalProperties": False,
                "description": "Switches of the model's chat template; one that it does not read is refused",
            }
        ),
    }
    return _body(fields | _refused(schemas.REFUSED | schemas.ONLY_IN_COMPLETIONS), "messages")


def completion_request(limits: Limits) -> Json:
    """Schema of a completion's body."""
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    text = {"type": "string", "minLength": 1}
    many = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts}
    fields = _common(limits) | {
        "prompt": {"oneOf": [text, ids, many | {"items": {"anyOf": [text, ids]}}]},
        "echo": _or_null({"type": "boolean"}),
        "logprobs": {"anyOf": [{"const": False}, _number("integer", 0, MAX_LOGPROBS)]},
    }
    return _body(fields | _refused(schemas.REFUSED | schemas.ONLY_IN_CHATS), "prompt")


def _common(limits: Limits) -> Json:
    boolean = _or_null({"type": "boolean"})
    stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars}
    stream_options = {"include_usage": boolean, "continuous_usage_stats": boolean}
    return {
        "model": _or_null({"type": "string", "description": "404 for a name that is not served; may be left out"}),
        "max_tokens": _number("integer", 0, None, "0 only goes with echo; prompt and answer have to fit the context"),
        "max_completion_tokens": _number("integer", 0, None, "Another name of max_tokens; the two must not differ"),
        "n": _number("integer", 1, MAX_CHOICES),
        "stream": boolean,
        "stream_options": _or_null(
            {"type": "object", "properties": stream_options, "description": "Goes with stream: true"}
        ),
        "stop": {"anyOf": [{"type": "null"}, stop, {"type": "array", "maxItems": limits.max_stop, "items": stop}]},
        "stop_token_ids": _or_null(
            {"type": "array", "maxItems": limits.max_stop_token_ids, "items": {"type": "integer", "minimum": 0}}
        ),
        "include_stop_str_in_output": boolean,
        "skip_special_tokens": boolean,
        "return_tokens_as_token_ids": boolean,
        "cache_salt": _or_null(
            {
                "type": "string",
                "minLength": 1,
                "description": "Only requests with the same one find each other's prompts in the prefix cache",
            }
        ),
        "ignore_eos": boolean,
        "min_tokens": _number("integer", 0, None),
        "seed": _number("integer", -_INT64, _INT64 - 1),
        "temperature": _number("number", 0, MAX_TEMPERATURE),
        "top_p": _number("number", 0, 1),
        "top_k": _number("integer", -1, (1 << 31) - 1),
        "min_p": _number("number", 0, 1),
        "presence_penalty": _number("number", -2, 2),
        "frequency_penalty": _number("number", -2, 2),
        "repetition_penalty": _number("number", LEAST_REPETITION, 2),
        "logit_bias": _or_null(
            {
                "type": "object",
                "maxProperties": limits.max_logit_bias,
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            }
        ),
    }


def _message(limits: Limits) -> Json:
    text = _object({"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}}, "type", "text")
    url = {"type": "string", "description": "A base64 data URI, or an address on a host that this server fetches from"}
    source = {"anyOf": [url, _object({"url": url}, "url")]}
    image = _object({"type": {"enum": ["image_url", "input_image"]}, "image_url": source}, "type", "image_url")
    texts = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": text}]}
    parts = {"type": "array", "minItems": 1, "items": {"anyOf": [text, image]}}
    nothing = {"function_call": {"type": "null"}, "audio": {"type": "null"}}
    no_calls = {"tool_calls": {"enum": [None, []]}}
    name = _or_null({"type": "string"})
    call = _object(
        {
            "id": name,
            "type": {"enum": ["function", None]},
            "function": _object(
                {
                    "name": {"type": "string", "pattern": tools.NAME_PATTERN},
                    "arguments": {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]},
                },
                "name",
            ),
        },
        "function",
    )
    roles = (
        {"role": {"enum": ["system", "developer"]}, "content": texts} | no_calls,
        {"role": {"const": "user"}, "content": {"anyOf": [{"type": "string"}, parts]}} | no_calls,
        {"role": {"const": "tool"}, "content": texts, "tool_call_id": name, "name": name} | no_calls,
    )
    assistant = {
        "role": {"const": "assistant"},
        "content": {"anyOf": [*texts["anyOf"], {"type": "null"}]},
        "reasoning_content": name,
        "reasoning": name,
        "tool_calls": _or_null({"type": "array", "items": call}),
    }
    return {
        "oneOf": [*(_object(role | nothing, "role", "content") for role in roles), _object(assistant | nothing, "role")]
    }


_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": tools.NAME_PATTERN},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "JSON schema of the arguments"},
            },
        },
    },
}


def _refused(table: dict[str, tuple[Any, ...]]) -> Json:
    note = "Not supported: only values that ask for nothing are taken"
    return {name: {"enum": [*harmless, None], "description": note} for name, harmless in table.items()}


def _body(fields: Json, required: str) -> Json:
    streamed = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
    wants_options = {"properties": {"stream_options": {"type": "object"}}, "required": ["stream_options"]}
    return _object(fields, required) | {"if": wants_options, "then": streamed}


# Answers

_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "JSON text, as far as the model wrote it"},
            },
        },
    },
}


def _object(fields: Json, *required: str) -> Json:
    return {"type": "object", "properties": fields, "required": list(required)}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _number(kind: str, least: int | float, most: int | float | None, note: str | None = None) -> Json:
    bounds = {"type": [kind, "null"], "minimum": least} | ({} if most is None else {"maximum": most})
    return bounds | ({} if note is None else {"description": note})


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _all(fields: Json) -> Json:
    """An object that has all of its fields."""
    return _object(fields, *fields)


def _answer(kind: str, choice: Json, *, whole: bool) -> Json:
    head = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
    }
    calls = _all({"vit_calls": {"type": "array", "items": {"type": "integer"}}})
    rest = {"usage": _ref("Usage") if whole else _or_null(_ref("Usage")), "vitstripe": calls}
    return _object(head | rest, *head, *(rest if whole else ()))


def _choice(content: Json, logprobs: str) -> Json:
    reason = {"enum": [*_STOP_REASONS, None]}
    shape = {"index": {"type": "integer"}, **content, "logprobs": _or_null(_ref(logprobs)), "finish_reason": reason}
    stop_reason = {"type": ["string", "integer", "null"]}
    return _object(shape | {"stop_reason": stop_reason}, *shape)


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_TOKEN = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": {"type": "integer"}}}
_OPTIONAL_NUMBER = {"type": ["number", "null"]}
_ANSWERS: Json = {
    "Error": _all(
        {
            "error": _all(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
    "Usage": _all(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _all({"cached_tokens": _COUNT, "image_tokens": _COUNT}),
            "completion_tokens_details": _all({"reasoning_tokens": _COUNT}),
        }
    ),
    "Message": _object(
        {
            "role": {"const": "assistant"},
            "content": {"type": ["string", "null"]},
            "reasoning_content": _TEXT,
            "tool_calls": {"type": "array", "items": _CALL},
        },
        "role",
        "content",
    ),
    "Delta": _object(
        {
            "role": {"const": "assistant"},
            "content": _TEXT,
            "reasoning_content": _TEXT,
            "tool_calls": {
                "type": "array",
                "items": _object(
                    {
                        "index": _COUNT,
                        "id": _TEXT,
                        "type": {"const": "function"},
                        "function": _object({"name": _TEXT, "arguments": _TEXT}),
                    },
                    "index",
                ),
            },
        }
    ),
    "ChatLogprobs": _object(
        {
            "content": {
                "type": "array",
                "items": _all(_TOKEN | {"top_logprobs": {"type": "array", "items": _all(_TOKEN)}}),
            }
        },
        "content",
    ),
    "CompletionLogprobs": _all(
        {
            "tokens": {"type": "array", "items": _TEXT},
            "token_logprobs": {"type": "array", "items": _OPTIONAL_NUMBER},
            "top_logprobs": _or_null({"type": "array", "items": _or_null({"type": "object"})}),
            "text_offset": {"type": "array", "items": _COUNT},
        }
    ),
    "ChatAnswer": _answer("chat.completion", _choice({"message": _ref("Message")}, "ChatLogprobs"), whole=True),
    "ChatChunk": _answer("chat.completion.chunk", _choice({"delta": _ref("Delta")}, "ChatLogprobs"), whole=False),
    "CompletionAnswer": _answer("text_completion", _choice({"text": _TEXT}, "CompletionLogprobs"), whole=True),
    "CompletionChunk": _answer("text_completion", _choice({"text": _TEXT}, "CompletionLogprobs"), whole=False),
    "Model": _object(
        {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT},
        "id",
        "object",
        "created",
        "owned_by",
        "max_model_len",
    ),
    "Models": _all({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
    "State": _all({"status": _TEXT, "state": _TEXT}),
    "Probe": _all({"status": _TEXT, "seconds": {"type": "number"}}),
    "TraceStarted": _all({"status": {"const": "started"}, "trace": _TEXT}),
    "TraceStatus": _all({"running": {"type": ["string", "null"]}}),
    "TraceStopped": _object(
        {
            "status": {"const": "stopped"},
            "trace": _TEXT,
            "seconds": {"type": "number"},
            "files": {"type": "array", "items": _all({"path": _TEXT, "bytes": _COUNT})},
            "device_events": {"type": "object", "additionalProperties": _COUNT},
            "note": _TEXT,
        },
        "status",
        "trace",
        "seconds",
        "files",
        "device_events",
    ),
}

# Routes

_WHY = {
    400: "The request cannot be served as it is; the text says what to change",
    401: "The key is missing or wrong",
    403: "The route is closed on this server",
    404: "Not served here",
    408: "The body took too long",
    409: "A trace runs already, or none does",
    413: "The body is too large",
    415: "The body is compressed",
    422: "An image could not be fetched",
    429: "The queue is full; Retry-After says when to try again",
    500: "A fault of the server; the text has the request id to quote",
    502: "The host of an image failed",
    503: "The server is starting, draining or out of room; Retry-After says when to try again",
    504: "The host of an image took too long",
}


def _media(name: str) -> Json:
    return {"schema": _ref(name)}


def _events(name: str) -> Json:
    return {
        "schema": {
            "type": "string",
            "description": f"Server-sent events: `data: ` and a {name} each, then `data: [DONE]`. A failure is one "
            "event with an Error, without `[DONE]`.",
        }
    }


def _errors(*codes: int) -> Json:
    content = {"application/json": _media("Error")}
    return {str(code): {"description": _WHY[code], "content": content} for code in codes}


def _generate(summary: str, request: Json, answers: Json) -> Json:
    codes = (400, 401, 404, 408, 413, 415, 422, 429, 500, 502, 503, 504)
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {"200": {"description": "The answer, whole or streamed", "content": answers}, **_errors(*codes)},
    }


def _get(summary: str, name: str, *, codes: tuple[int, ...], open_: bool = False) -> Json:
    content = {"application/json": _media(name)}
    route: Json = {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **_errors(*codes)},
    }
    return route | ({"security": []} if open_ else {})


def _control(summary: str, name: str, *, codes: tuple[int, ...] = ()) -> Json:
    return _get(summary, name, codes=(401, 403, 404, 500, *codes)) | {"security": [{"adminKey": []}]}
