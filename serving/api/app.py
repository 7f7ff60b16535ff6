"""The HTTP app: routes, and the path of a request from its body to its answer.

```
body -> parse -> images -> render and tokenise -> engine -> text
        |------ worker threads ------------|     its own   event loop
```

The event loop only moves bytes: a burst of large images must not delay a health probe.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from serving.api.answers import Answer, Kind
from serving.api.control import CONTROL_PATHS, Control
from serving.api.delivery import Delivery, orders_of
from serving.api.errors import ApiError, invalid, on_api_error, unavailable
from serving.api.fetch import Fetcher
from serving.api.generation import Generation, is_alive
from serving.api.intake import Intake, Workers
from serving.api.keys import Gate, Keys
from serving.api.limits import Limits
from serving.api.media import ImageIntake, ImageProcessor
from serving.api.messages import ImagePart
from serving.api.observe import Observer, log_fields, trace_id
from serving.api.openapi import document
from serving.api.page import PAGE_PATH, page_route
from serving.api.probe import Probe
from serving.api.prompts import Prompt, chat_prompt, check_echo, completion_prompt, sampling_params
from serving.api.schemas import Options, parse_chat, parse_completion
from serving.api.sse import EventStream, while_connected
from serving.chat import AnswerParser, ChatTemplate, Parsers
from serving.metrics import Metrics
from serving.profiling import Profiler
from serving.protocol import EngineClient, PreparedImage
from serving.tokenizer import Tokenizer

_OPEN_PATHS = ("/health", "/ready", "/metrics")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class _Prepared:
    """A request ready for the engine; `parser` makes what reads the text of one of its answers."""

    prompts: list[Prompt]
    options: Options
    parser: Callable[[], AnswerParser] = AnswerParser


Prepare = Callable[[bytes], Coroutine[Any, Any, _Prepared]]


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    processor: ImageProcessor | None,
    limits: Limits,
    metrics: Metrics,
    extra_routes: Sequence[BaseRoute] = (),
    fetcher: Fetcher | None = None,
    parsers: Parsers | None = None,
    keys: Keys | None = None,
    profiler: Profiler | None = None,
    page: bool = False,
) -> Starlette:
    """The OpenAI-compatible app around an engine.

    Args:
        template: None for a checkpoint without one; chats are then refused.
        processor: None for a text-only checkpoint; images are then refused.
        extra_routes: further routes, such as those of a profiler; they get the same error bodies and log lines.
        fetcher: None for a server that takes images only as data URIs.
        parsers: how answers to chats are read; None takes them as plain text.
        keys: None leaves the model open and the control routes closed.
        profiler: None for a server that makes no traces.
        page: serve the page for browsers, which is open to everybody.
    """
    api = _Api(engine, tokenizer, template, processor, limits, metrics, fetcher, parsers or Parsers())
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completion, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{model:path}", api.model, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
        Route("/health_generate", api.health_generate, methods=["GET"]),
        Route("/ready", api.ready, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/openapi.json", api.openapi, methods=["GET"]),
        *Control(profiler).routes(),
        *([page_route()] if page else []),
        *extra_routes,
    ]
    open_paths = (*_OPEN_PATHS, PAGE_PATH) if page else _OPEN_PATHS
    paths = {route.path for route in routes if isinstance(route, Route)}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        api.shutdown()
        if profiler is not None:
            await asyncio.to_thread(profiler.close)

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Observer, metrics=metrics, routes=paths, probes=_OPEN_PATHS),
            Middleware(Gate, keys=keys or Keys(), open_paths=open_paths, control_paths=CONTROL_PATHS),
        ],
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
        fetcher: Fetcher | None,
        parsers: Parsers,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._metrics = metrics
        self._intake = Intake(limits)
        self._text = Workers(limits.text_workers, "text")
        takes_images = tokenizer.image_token_id is not None
        self._images = ImageIntake(processor if takes_images else None, limits, self._intake, fetcher)
        self._parsers = parsers
        self._created = int(time.time())
        self._probe = Probe(engine, tokenizer.encode_plain("a")[:1], limits)

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
        prepared = await self._read(request, prepare)
        prompts, options = prepared.prompts, prepared.options
        answer = Answer.begin(kind, self._engine.model_name, options.include_usage, options.running_usage)
        limit, vocab = self._engine.max_model_len, self._tokenizer.vocab_size
        params = [sampling_params(options, prompt, limit, vocab) for prompt in prompts]
        check_echo(options, prompts, self._limits)
        log_fields(request).update(
            answer_id=answer.id,
            prompts=len(prompts),
            n=options.n,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            image_tokens=sum(prompt.image_tokens for prompt in prompts),
            images=sum(len(prompt.images) for prompt in prompts),
            max_tokens=max(p.max_tokens for p in params),
            stream=options.stream,
        )
        for one in params:
            self._metrics.asked(n=options.n, max_tokens=one.max_tokens)
        ordered = list(zip(prompts, params, strict=True))
        made = orders_of(answer, ordered, options, self._tokenizer, self._engine.eos_ids, prepared.parser)
        generation = Generation(
            self._engine,
            [order for order, _ in made],
            limits=self._limits,
            metrics=self._metrics,
            trace_id=trace_id(request),
            arrived=arrived,
        )
        delivery = Delivery(generation, answer, [shown for _, shown in made])
        del prepared, prompts, ordered, made  # the engine decides how long the images are kept
        if options.stream:
            return await _streamed(request, delivery)
        return await _whole(request, delivery)

    async def _read(self, request: Request, prepare: Prepare) -> _Prepared:
        """Read and prepare a body. A frame of its own, so that the body is not kept while the answer is made."""
        async with self._intake.body(request) as raw:
            return await while_connected(request.receive, prepare(raw))

    async def _prepare_chat(self, raw: bytes) -> _Prepared:
        parsed = await self._text.run(parse_chat, raw, self._limits)
        self._check_model(parsed.options)
        if self._template is None:
            raise invalid("this checkpoint has no chat template; use /v1/completions", "messages")
        images = await self._prepare_images(parsed.images())
        prompt = await self._text.run(
            chat_prompt, parsed, images, self._template, self._tokenizer, self._engine.max_model_len
        )
        tools = parsed.tools.parameters() if parsed.tools.declared else None
        parser = partial(self._parsers.parser, prompt.opening, tools, parallel=parsed.tools.parallel)
        return _Prepared([prompt], parsed.options, parser)

    async def _prepare_images(self, parts: list[ImagePart]) -> list[PreparedImage]:
        began = time.perf_counter()
        images = await self._images.prepare(parts)
        if parts:
            self._metrics.image_prepare(time.perf_counter() - began)
        return images

    async def _prepare_completion(self, raw: bytes) -> _Prepared:
        parsed = await self._text.run(parse_completion, raw, self._limits)
        self._check_model(parsed.options)
        most = self._engine.max_model_len
        prompts = [await self._text.run(completion_prompt, one, self._tokenizer, most) for one in parsed.prompts]
        return _Prepared(prompts, parsed.options)

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

    async def health_generate(self, request: Request) -> Response:
        """The whole way works: the engine made a token just now."""
        self._check_state()
        return JSONResponse({"status": "alive", "seconds": round(await self._probe.run(), 4)})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(self._limits, self._engine.model_name))

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=_METRICS_TYPE)


async def _whole(request: Request, delivery: Delivery) -> Response:
    async def collect() -> dict[str, Any]:
        await delivery.begin()
        return await delivery.whole()

    try:
        return JSONResponse(await while_connected(request.receive, collect()))
    finally:
        delivery.close(log_fields(request))


async def _streamed(request: Request, delivery: Delivery) -> Response:
    close = partial(delivery.close, log_fields(request))
    try:
        await while_connected(request.receive, delivery.begin())
    except BaseException:
        close()
        raise
    return EventStream(delivery.events(trace_id(request)), close)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same shape as every other error."""
    assert isinstance(error, HTTPException)
    texts = {404: "there is no such route", 405: "this route does not take this method"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    status = error.status_code
    message = texts.get(status, error.detail)
    return ApiError(status, message, code=codes.get(status), headers=dict(error.headers or {})).response()
