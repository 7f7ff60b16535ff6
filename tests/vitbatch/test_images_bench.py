"""scripts/bench_images: measures, compares where it can, and writes its figures."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_images", ROOT / "scripts" / "lib" / "bench_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bench_images", module)
        spec.loader.exec_module(module)
        yield module


def test_the_bench_prints_a_row_a_size_and_writes_them(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 0.0)
    out = tmp_path / "figures.json"
    sizes = ["60x90", "33x71"]
    assert bench.main(["--family", "glm5_next", "--sizes", *sizes, "--rounds", "1", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [(row["size"], row["tokens"]) for row in figures["rows"]] == [("60x90", 20), ("33x71", 18)]
    assert all(row["cpu_ms"] > 0 and row["alone"] > 0 and row["together"] > 0 for row in figures["rows"])
    shown = capsys.readouterr().out
    assert all(size in shown for size in sizes)
    assert "load average" in shown


def test_the_bench_refuses_to_compare_different_pixels(bench):
    family = bench.FAMILIES["glm46v"]
    tower = {name: family.settings[name] for name in bench.TOWER_FIELDS}
    processor = bench.read_processor(family.settings | {"image_processor_type": family.kind}, **tower)
    data = bench.picture("60x90", "PNG")
    image = processor.prepare(data)
    rows = image.patches.reshape(-1, 3, 1, 196) / np.float32(255)
    mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (processor.mean, processor.std))
    same = np.repeat((rows - mean) / std, 2, axis=2)
    made = {"pixel_values": same.reshape(len(rows), -1), "image_grid_thw": np.array([image.grid_thw])}
    bench.check_equal(processor, lambda _: made, data)
    with pytest.raises(SystemExit, match=r"error: the pixels differ by up to 0\.0"):
        bench.check_equal(processor, lambda _: made | {"pixel_values": made["pixel_values"] + 0.01}, data)
    with pytest.raises(SystemExit, match=r"error: our grid is .*, transformers' "):
        bench.check_equal(processor, lambda _: made | {"image_grid_thw": np.array([[1, 2, 2]])}, data)
