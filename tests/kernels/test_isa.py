"""Every kernel compiles to AMD machine code as it should: no spills, matrix instructions of the right kind."""

from importlib.util import find_spec

import pytest

from scripts.lib.amd_isa import compile_kernel, kernel_sources
from scripts.lib.rocm_kernels import ARCHS, kernel_cases, problems

pytestmark = [
    pytest.mark.isa,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: install the extra isa"),
]
CASES = [case for arch in ARCHS for case in kernel_cases(arch)]


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_compiler(tmp_path_factory):
    """Its own folder: the default is in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.arch}, {case.name}")
def test_the_kernel_compiles_to_good_machine_code(case):
    sources = kernel_sources(case.fn, case.args, case.arch)
    assert sources
    found = {source.name: problems(case, compile_kernel(source, case.arch)) for source in sources}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
