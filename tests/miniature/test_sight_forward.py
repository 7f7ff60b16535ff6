"""Sight's training forward against the server: the same logits, the same answers."""

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest

from scripts.lib.miniature.export import write_folder
from scripts.lib.miniature.sight.forward import answer_logits, picture_rows
from scripts.lib.miniature.sight.layout import Layout
from scripts.lib.miniature.sight.miniature import TEMPLATE, make
from scripts.lib.miniature.sight.packing import Packer, Row
from scripts.lib.miniature.sight.scenes import Level, Question, draw_things, draw_words
from scripts.lib.miniature.weights import Weights, rounded
from serving.config import EngineConfig
from serving.positions import mrope_positions
from serving.protocol import ImageSpan
from serving.tokenizer import Tokenizer
from tests.helpers import relative_error
from tests.serving.harness import Driver
from vitbatch import BucketLadder, EncoderConfig, VisionEncoder
from vitstripe.checkpoint import Checkpoint

# The driver gives the logits of as many rows as there may be requests.
CONFIG = EngineConfig(max_model_len=160, page_size=8, max_seqs=160, prefill_tokens=160)
LAYOUT = Layout(4, 2, 192, 160, questions=3)
ASKED = (
    Question("colour", "What colour is the star?", "purple"),
    Question("where", "where is the red object", "bottom left"),
    Question("read", "Read the text.", "ZEBRA"),
)


@pytest.fixture(scope="module")
def sight():
    return make("tiny")


@pytest.fixture(scope="module")
def weights(sight):
    return Weights(sight.parts(jnp.float32))


@pytest.fixture(scope="module")
def params(weights):
    """Far from what training starts with: norms and biases that are not ones and zeros, scores that are not flat."""
    grown = {}
    for i, (path, value) in enumerate(weights.initial(3).items()):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(5), i), value.shape)
        grown[path] = 1.5 * value + 0.2 * noise * (value.ndim < 2)
    return rounded(grown)


@pytest.fixture(scope="module")
def folder(sight, weights, params, tmp_path_factory):
    path = tmp_path_factory.mktemp("sight")
    write_folder(path, weights.tensors(params), sight.files(), "a card")
    return path


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(1)
    wide, small = draw_things(rng, 150, 70, Level()).image, draw_things(rng, 61, 58, Level()).image
    text = draw_words(rng, 96, 128, Level(), 1.0).image
    return [
        Row([wide], ASKED, (0, 3, 5)),
        Row([small, text], ASKED[1:], (3, 5)),
        Row([text, wide], ASKED[:1], (0,), text_first=True),
        Row([small], ASKED, (0, 3, 5), chained=True),
    ]


def messages(row: Row, number: int) -> list[dict]:
    """The conversation that ends in the row's question `number`."""
    images = [{"type": "image"}] * len(row.images)
    turns = []
    for i in range(number + 1) if row.chained else [number]:
        text = [{"type": "text", "text": row.questions[i].text}]
        content = [*text, *images] if row.text_first else [*images, *text]
        turns.append({"role": "user", "content": text if turns else content})
        turns.append({"role": "assistant", "content": row.questions[i].answer})
    return turns[:-1]


def prompt(tokenizer: Tokenizer, prepared: list, conversation: list[dict]) -> tuple[list[int], list[ImageSpan]]:
    text = jinja2.Environment().from_string(TEMPLATE).render(messages=conversation, add_generation_prompt=True)
    ids, spans = [], []
    for token in tokenizer.encode_rendered(text):
        if token == tokenizer.image_token_id:
            spans.append(ImageSpan(len(ids), prepared[len(spans)]))
            ids += [token] * prepared[len(spans) - 1].num_tokens
        else:
            ids.append(token)
    return ids, spans


class Served:
    """The server's own programs on one device, without its engine."""

    def __init__(self, folder, mesh):
        config = EncoderConfig(ladder=BucketLadder((384,)), dtype=jnp.float32)
        self.encoder = VisionEncoder.from_checkpoint(folder, mesh=mesh, config=config)
        self.tokenizer = Tokenizer.from_checkpoint(folder)
        self.driver = Driver(Checkpoint(folder), 1, np.zeros((128, 3 * 48), np.float32), CONFIG)

    def sequence(self, row: Row, number: int, answer: list[int]):
        """The conversation up to the question, with some of its answer, as a request."""
        prepared = [self.encoder.processor.prepare(image) for image in row.images]
        ids, spans = prompt(self.tokenizer, prepared, messages(row, number))
        ends = np.cumsum([image.num_tokens for image in prepared])
        self.driver.pool = np.zeros((128, 3 * 48), np.float32)
        self.driver.pool[: ends[-1]] = np.concatenate(self.encoder.encode(list(row.images)))
        places = [(span.start, span.image.grid_thw) for span in spans]
        positions, delta = mrope_positions(len(ids) + len(answer), places, 2)
        seq = self.driver.sequence(ids + answer, tuple(spans), positions, delta)
        seq.slots = [
            np.arange(end - image.num_tokens, end, dtype=np.int32) for end, image in zip(ends, prepared, strict=True)
        ]
        return seq

    def logits(self, row: Row, number: int) -> np.ndarray:
        """[A, V]: the logits of the answer's tokens and of its end."""
        answer = self.tokenizer.encode_plain(row.questions[number].answer)
        return self.driver.prefill(self.sequence(row, number, answer), [])[-len(answer) - 1 :]

    def greedy(self, row: Row, number: int, count: int) -> list[int]:
        seq = self.sequence(row, number, [])
        return self.driver.greedy(seq, int(self.driver.prefill(seq, [])[-1].argmax()), count)


@pytest.fixture(scope="module")
def served(folder, mesh_of):
    return Served(folder, mesh_of(1))


@pytest.fixture(scope="module")
def batch(sight, rows):
    packer = Packer(LAYOUT, sight._plan, sight._tokens)
    for row in rows:
        packer.add(row)
    return packer.batch


@pytest.mark.slow
def test_every_question_of_a_row_gets_the_logits_that_the_server_computes(weights, params, rows, batch, served):
    def forward(params, batch):
        modules = weights.modules(params)
        return answer_logits(modules["text"], picture_rows(modules["vision"], batch), batch)

    logits = np.asarray(jax.jit(forward)(params, batch))
    for r, row in enumerate(rows):
        for number in range(len(row.questions)):
            own = (batch["slot"][r] == number) & (batch["targets"][r] >= 0)
            assert relative_error(logits[r][own], served.logits(row, number)) < 2e-5, (r, number)


@pytest.mark.slow
def test_an_answer_counts_as_right_exactly_when_the_server_decodes_it(sight, weights, params, rows, batch, served):
    """Question 2 of row 0 has six answer tokens. They are replaced by what the server says, and by that but for one."""
    own = np.flatnonzero((batch["slot"][0] == 2) & (batch["targets"][0] >= 0))
    said = served.greedy(rows[0], 2, len(own))
    other = [*said[:3], (said[3] + 1) % 100, *said[4:]]
    score = jax.jit(lambda params, batch: sight.score(weights.modules(params), batch, "small"))
    verdicts = []
    for answer in (said, other):
        changed = {name: array.copy() for name, array in batch.items()}
        changed["targets"][0, own] = answer
        changed["ids"][0, batch["at"][0, own] + 1] = answer
        verdicts.append(bool(score(params, changed).correct[0, 2]))
    assert verdicts == [True, False]
