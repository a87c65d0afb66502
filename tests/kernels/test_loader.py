"""Building the C++ operators: once for many processes, never fatal, and chosen as the environment says."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from kernels import implementation, ops
from kernels.cpu import loader


def test_many_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[Path] = []

    def build(sources: list[str], target: Path) -> None:
        time.sleep(0.05)
        built.append(target)
        target.write_text("library")

    monkeypatch.setenv("CHORAL_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "_build", build)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: loader._library(), range(4)))
    assert paths == {built[0]} and len(built) == 1
    assert built[0].parent == tmp_path / "kernels"


def test_a_change_of_source_or_version_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "a.cpp"
    source.write_text("one")
    first = loader._fingerprint([source])
    source.write_text("two")
    second = loader._fingerprint([source])
    monkeypatch.setattr(torch, "__version__", "0")
    assert len({first, second, loader._fingerprint([source])}) == 3


@pytest.fixture
def fresh_choice():
    implementation._built.cache_clear()
    yield
    implementation._built.cache_clear()


def test_without_a_compiler_the_reference_runs_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_choice: None
):
    monkeypatch.setenv("CHORAL_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("CHORAL_KERNELS", raising=False)
    assert "no C++ compiler found: no-such-compiler" in ops.implementation("cpu")
    assert ops.rms_norm(torch.ones(1, 8), torch.ones(8), 0.0).tolist() == [[1.0] * 8]


def test_a_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_choice: None):
    monkeypatch.setenv("CHORAL_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.delenv("CHORAL_KERNELS", raising=False)
    assert ops.implementation("cpu").startswith("torch reference (no C++ kernels: ")
    assert not list((tmp_path / "kernels").glob("*.so"))


@pytest.mark.skipif(shutil.which("true") is None, reason="needs the command true in place of a compiler")
def test_a_build_is_announced_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def compiler(*args: object, build_directory: str, **options: object) -> None:
        assert "building the C++ kernels for this processor, once, in" in caplog.text
        (Path(build_directory) / "choral_kernels.so").write_text("library")

    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "load", compiler)
    with caplog.at_level("INFO", "kernels"):
        loader._build([], tmp_path / "target.so")
    assert caplog.messages[-1].startswith("built the C++ kernels in")
    assert (tmp_path / "target.so").read_text() == "library"


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch, fresh_choice: None):
    monkeypatch.setenv("CHORAL_KERNELS", "reference")
    assert ops.implementation("cpu") == "torch reference (CHORAL_KERNELS=reference)"
    assert implementation.cpu_kernels(torch.device("cpu")) is None


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch, fresh_choice: None):
    monkeypatch.setenv("CHORAL_KERNELS", "fast")
    with pytest.raises(ValueError, match="CHORAL_KERNELS"):
        ops.implementation("cpu")


def test_other_devices_get_the_reference():
    assert ops.implementation("meta") == "torch reference (meta)"
    assert implementation.cpu_kernels(torch.device("meta")) is None
    assert implementation.triton_kernels(torch.device("meta")) is None
