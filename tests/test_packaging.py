"""What is shipped: packages, data, licence, extras."""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from PIL import Image, ImageOps

from tests.helpers import DATA

ROOT = Path(__file__).parent.parent
PACKAGES = ("vitstripe", "vitbatch", "dsa_indexer", "serving")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIGITS = ROOT / "serving" / "assets" / "digits"
PHOTOS = DATA / "photos"


def versions_allowed(extra: str, package: str, versions: list[str]) -> list[str]:
    """Those of `versions` that both the project and the extra allow."""
    wanted = [Requirement(r) for r in PROJECT["dependencies"] + EXTRAS[extra]]
    ranges = [r.specifier for r in wanted if r.name == package]
    return [v for v in versions if all(Version(v) in found for found in ranges)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_a_package(package):
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert folders, f"{package} holds no code"
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_the_licence_is_apache_2_in_text_and_metadata():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_extras_are_the_documented_ones():
    assert set(EXTRAS) == {"rocm7", "rocm10", "cuda", "goldens", "plots", "isa", "eval", "aot", "train", "dev"}


def test_the_rocm_extras_stay_at_versions_that_have_plugins():
    # 0.12.0.1 exists for jax, but no ROCm plugin of that version does.
    versions = ["0.10.1", "0.10.2", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"]
    assert versions_allowed("rocm7", "jax", versions) == ["0.10.2", "0.11.1", "0.11.2", "0.12.0"]
    assert versions_allowed("rocm10", "jax", versions) == ["0.11.1", "0.11.2", "0.12.0"]
    assert versions_allowed("rocm10", "jax-rocm10-plugin", versions) == ["0.11.1", "0.11.2", "0.12.0"]


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("\n]")[0].strip().splitlines()
    assert len(lines) == len(PROJECT["dependencies"])
    assert [line for line in lines if "  # " not in line] == []


def test_the_digits_are_two_of_each_at_the_size_their_name_says():
    files = sorted(DIGITS.glob("*.png"))
    labels = Counter()
    for file in files:
        label, width, height = re.fullmatch(r"digit_(\d)_\d\d_(\d+)x(\d+)\.png", file.name).groups()
        with Image.open(file) as image:
            assert image.size == (int(width), int(height)), file.name
            assert image.mode == "RGB"
        labels[int(label)] += 1
    assert labels == dict.fromkeys(range(10), 2)
    assert len({tuple(f.stem.split("_")[3:]) for f in files}) == 5, "five sizes, so that a batch is mixed"


def test_the_photos_are_mixed_small_and_accounted_for():
    files = sorted(p for p in PHOTOS.iterdir() if p.suffix != ".md")
    sources = (PHOTOS / "SOURCES.md").read_text()
    assert [f.name for f in files if f.name not in sources] == []
    assert sum(f.stat().st_size for f in files) < 600_000
    assert {f.suffix for f in files} == {".jpg", ".png", ".webp"}
    turned = []
    for file in files:
        width, height = map(int, file.stem.rsplit("_", 1)[1].split("x"))
        with Image.open(file) as image:
            shown = ImageOps.exif_transpose(image)
            assert shown.size == (width, height), file.name
            if image.size != shown.size:
                turned.append(file.name)
    assert turned == ["astronaut_exif6_240x320.jpg"]


@pytest.mark.slow
def test_the_wheel_holds_the_packages_their_data_and_the_licence(tmp_path):
    source = tmp_path / "source"
    for package in PACKAGES:
        copytree(ROOT / package, source / package, ignore=ignore_patterns("__pycache__"))
    copytree(ROOT / "tests", source / "tests", ignore=ignore_patterns("__pycache__", "goldens"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())

    wanted = {str(f.relative_to(source)) for p in PACKAGES for f in (source / p).rglob("*") if f.is_file()}
    assert wanted <= held
    assert "serving/assets/digits_vlm/model.safetensors" in held
    assert len([name for name in held if name.startswith("serving/assets/digits/digit_")]) == 20
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == set(PACKAGES)
