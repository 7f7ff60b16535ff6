"""The HTTP app: routes, and the path of a request from its body to its answer.

```
body -> parse -> images -> render and tokenise -> engine -> text
        |------ worker threads ------------|     its own   event loop
```

The event loop only moves bytes: a burst of large images must not delay a health probe.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from serving.api.answers import Answer, Kind
from serving.api.errors import ApiError, internal, invalid, on_api_error, unavailable
from serving.api.generation import Generation, is_alive, logger
from serving.api.intake import Intake, Workers
from serving.api.limits import Limits
from serving.api.media import ImageProcessor, prepare_image
from serving.api.observe import Observer, log_fields, trace_id
from serving.api.prompts import Prompt, chat_prompt, completion_prompt, sampling_params
from serving.api.schemas import ImagePart, Options, parse_chat, parse_completion
from serving.api.sse import DONE, EventStream, event, while_connected
from serving.chat import ChatTemplate
from serving.metrics import Metrics
from serving.protocol import EngineClient, PreparedImage, Submission
from serving.stream import TextStream
from serving.tokenizer import Tokenizer

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Prepare = Callable[[bytes], Coroutine[Any, Any, tuple[Prompt, Options]]]


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    processor: ImageProcessor | None,
    limits: Limits,
    metrics: Metrics,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The OpenAI-compatible app around an engine.

    Args:
        template: None for a checkpoint without one; chats are then refused.
        processor: None for a text-only checkpoint; images are then refused.
        extra_routes: further routes, such as those of a profiler; they get the same error bodies and log lines.
    """
    api = _Api(engine, tokenizer, template, processor, limits, metrics)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completion, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{model:path}", api.model, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
        Route("/ready", api.ready, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        *extra_routes,
    ]
    paths = {route.path for route in routes if isinstance(route, Route)}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        api.shutdown()

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Observer, metrics=metrics, routes=paths)],
        exception_handlers={ApiError: on_api_error, HTTPException: _on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body in many clients
    return app


class _Api:
    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        processor: ImageProcessor | None,
        limits: Limits,
        metrics: Metrics,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._processor = processor
        self._limits = limits
        self._metrics = metrics
        self._intake = Intake(limits)
        self._text = Workers(limits.text_workers, "text")
        self._images = Workers(limits.image_workers, "image")
        self._created = int(time.time())

    def shutdown(self) -> None:
        self._text.shutdown()
        self._images.shutdown()

    # Generation

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat", self._prepare_chat)

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, "completion", self._prepare_completion)

    async def _generate(self, request: Request, kind: Kind, prepare: Prepare) -> Response:
        arrived = time.perf_counter()
        self._check_state()
        prompt, options = await self._read(request, prepare)
        answer = Answer.begin(kind, self._engine.model_name, options.include_usage)
        params = sampling_params(options, prompt, self._engine.max_model_len)
        log_fields(request).update(
            answer_id=answer.id,
            prompt_tokens=len(prompt.ids),
            image_tokens=prompt.image_tokens,
            images=len(prompt.images),
            max_tokens=params.max_tokens,
            stream=options.stream,
        )
        generation = Generation(
            self._engine,
            Submission(answer.id, prompt.ids, prompt.images, params),
            TextStream(self._tokenizer, options.stop),
            limits=self._limits,
            metrics=self._metrics,
            trace_id=trace_id(request),
            arrived=arrived,
        )
        del prompt  # the engine decides how long its images are kept
        close = partial(_close, generation, log_fields(request))
        if options.stream:
            return await _streamed(request, generation, answer, close)
        return await _whole(request, generation, answer, close)

    async def _read(self, request: Request, prepare: Prepare) -> tuple[Prompt, Options]:
        """Read and prepare a body. A frame of its own, so that the body is not kept while the answer is made."""
        async with self._intake.body(request) as raw:
            return await while_connected(request.receive, prepare(raw))

    async def _prepare_chat(self, raw: bytes) -> tuple[Prompt, Options]:
        parsed = await self._text.run(parse_chat, raw, self._limits)
        self._check_model(parsed.options)
        if self._template is None:
            raise invalid("this checkpoint has no chat template; use /v1/completions", "messages")
        images = await self._prepare_images(parsed.images())
        prompt = await self._text.run(chat_prompt, parsed, images, self._template, self._tokenizer)
        return prompt, parsed.options

    async def _prepare_images(self, parts: Sequence[ImagePart]) -> list[PreparedImage]:
        if not parts:
            return []
        processor = self._processor
        if processor is None or self._tokenizer.image_token_id is None:
            raise invalid("this model reads text only; send no images", parts[0].param, "unsupported_value")

        def prepare(part: ImagePart) -> PreparedImage:
            return prepare_image(part.payload, part.param, processor)

        return await self._images.map(prepare, parts)

    async def _prepare_completion(self, raw: bytes) -> tuple[Prompt, Options]:
        parsed = await self._text.run(parse_completion, raw, self._limits)
        self._check_model(parsed.options)
        prompt = await self._text.run(completion_prompt, parsed.prompt, self._tokenizer)
        return prompt, parsed.options

    def _check_state(self) -> None:
        """Refuse before any work is done for a request that the engine would not take."""
        health = self._engine.health()
        if health.state != "ready":
            raise unavailable(f"the server is {health.state}: {health.detail}", retry_after=5.0)

    def _check_model(self, options: Options) -> None:
        if options.model is not None and options.model != self._engine.model_name:
            raise self._unknown_model(options.model)

    def _unknown_model(self, name: str) -> ApiError:
        return ApiError(
            404,
            f"model {name[:200]!r} is not served here; this server has {self._engine.model_name!r}",
            param="model",
            code="model_not_found",
        )

    # Information

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._engine.model_name:
            raise self._unknown_model(name)
        return JSONResponse(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        name = self._engine.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vitstripe",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        """Alive: this event loop answers and the engine's thread showed a sign of life lately, ready or not."""
        health = self._engine.health()
        if not is_alive(health, self._limits):
            raise unavailable(
                f"the engine is {health.state}, last sign of life {health.heartbeat_age:.1f} s ago "
                f"(limit {self._limits.heartbeat_seconds:g} s): {health.detail}"
            )
        return JSONResponse({"status": "alive", "state": health.state})

    async def ready(self, request: Request) -> Response:
        """Ready: every program was compiled and run, and the server takes requests."""
        health = self._engine.health()
        if health.state != "ready" or not is_alive(health, self._limits):
            raise unavailable(f"not ready, the server is {health.state}: {health.detail}")
        return JSONResponse({"status": "ready", "state": health.state})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=_METRICS_TYPE)


def _close(generation: Generation, fields: dict[str, Any]) -> None:
    generation.close()
    fields.update(
        completion_tokens=generation.usage.completion_tokens,
        finish_reason=generation.outcome.reason if generation.outcome else "unfinished",
    )


async def _whole(request: Request, generation: Generation, answer: Answer, close: Callable[[], None]) -> Response:
    async def collect() -> str:
        await generation.begin()
        return "".join([piece async for piece in generation.pieces()])

    try:
        text = await while_connected(request.receive, collect())
    finally:
        close()
    assert generation.outcome is not None
    return JSONResponse(answer.whole(text, generation.outcome))


async def _streamed(request: Request, generation: Generation, answer: Answer, close: Callable[[], None]) -> Response:
    try:
        await while_connected(request.receive, generation.begin())
    except BaseException:
        close()
        raise
    return EventStream(_events(generation, answer, trace_id(request)), close)


async def _events(generation: Generation, answer: Answer, request_trace: str) -> AsyncGenerator[bytes, None]:
    """Encoded chunks. A failure is one error event and the end, without `[DONE]`: never a silently short stream."""
    try:
        opening = answer.opening()
        if opening is not None:
            yield event(opening)
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                yield event(answer.piece(piece))
        assert generation.outcome is not None
        yield event(answer.closing(generation.outcome))
        if answer.include_usage:
            yield event(answer.totals(generation.outcome))
        yield DONE
    except ApiError as error:
        yield event(error.body())
    except Exception:
        logger.exception("request %s failed while streaming", request_trace)
        yield event(internal(request_trace).body())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same shape as every other error."""
    assert isinstance(error, HTTPException)
    texts = {404: "there is no such route", 405: "this route does not take this method"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    status = error.status_code
    message = texts.get(status, error.detail)
    return ApiError(status, message, code=codes.get(status), headers=dict(error.headers or {})).response()
