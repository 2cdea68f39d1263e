"""The distributions hold what the checkout holds, under the right names, and the checkout's links are links."""

import email
import email.message
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deltacast

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"delta": "../../delta", "engines": "../../engines", "store": "../../store"}
BARE_NAMES = sorted(LINKS)

pytestmark = pytest.mark.skipif(
    not (ROOT / "src" / "deltacast" / "delta").exists(), reason="an unpacked sdist has no links to look at"
)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def build(target: str, source: Path, to: Path) -> Path:
    """Build the sdist or the wheel of a source tree without network."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-P", "-m", "hatchling", "build", "--target", target, "--directory", str(to)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    [built] = to.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    [unpacked] = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of the checkout."""
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds the unpacked wheel."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_bytes(wheel.read(f"deltacast-{deltacast.__version__}.dist-info/METADATA"))


def modules_of_checkout() -> set[str]:
    """Files that should be in a wheel, by walking through the links."""
    walked = os.walk(ROOT / "src" / "deltacast", followlinks=True)
    files = [Path(folder, name).relative_to(ROOT / "src") for folder, _, names in walked for name in names]
    return {file.as_posix() for file in files if file.suffix == ".py" or file.name == "py.typed"}


def package_files(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if ".dist-info/" not in name]


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a child that starts in `cwd` and imports from `path` first, if given."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def git(*arguments: str) -> str:
    """Run git on the checkout; skip where there is no repository or git refuses it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"git refuses: {done.stderr.strip()}")
    return done.stdout


def test_the_wheel_holds_the_checkouts_modules_each_once(wheel: zipfile.ZipFile) -> None:
    """No module is left out, doubled, or shipped under a bare name such as `delta`."""
    files = package_files(wheel)
    assert sorted(files) == sorted(modules_of_checkout())


def test_every_package_has_an_init(wheel: zipfile.ZipFile) -> None:
    """A folder without one would be a namespace package, which type checkers and linters see differently."""
    files = set(package_files(wheel))
    assert {str(Path(file).parent / "__init__.py") for file in files if file.endswith(".py")} <= files


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: zipfile.ZipFile, sdist: Path, tmp_path: Path) -> None:
    """The sdist has no links, and needs none: file by file, it gives the checkout's wheel."""
    with zipfile.ZipFile(build("wheel", sdist, tmp_path)) as other:
        assert {info.filename: info.CRC for info in other.infolist()} == {
            info.filename: info.CRC for info in wheel.infolist()
        }


@pytest.mark.parametrize("name", ["tests/test_packaging.py", "docs", "LICENSE", "README.md", "CHANGELOG.md"])
def test_the_sdist_holds_more_than_the_package(sdist: Path, name: str) -> None:
    """Tests, docs and licence travel with the sources."""
    assert (sdist / name).exists()


def test_the_sdist_holds_only_committed_files(sdist: Path) -> None:
    """Nothing that lies about in a working tree is published."""
    known = set(git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()) | {"PKG-INFO"}
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert found - known == set()


def test_the_wheel_carries_licence_types_and_command(wheel: zipfile.ZipFile) -> None:
    """Apache-2.0's text, the marker for type checkers, and the console script."""
    info = f"deltacast-{deltacast.__version__}.dist-info"
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "deltacast/py.typed" in wheel.namelist()
    assert "[console_scripts]\ndeltacast = deltacast.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_one_version_everywhere(metadata: email.message.Message, project: dict[str, Any]) -> None:
    """`deltacast.__version__`, pyproject.toml and the wheel's metadata agree, and the changelog knows the version."""
    assert metadata["Version"] == project["project"]["version"] == deltacast.__version__
    assert deltacast.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_core_dependencies_are_these_seven(metadata: email.message.Message) -> None:
    """A plain install pulls in nothing else; everything more is an extra."""
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0] for line in required}
    assert names == {"torch", "numpy", "zstandard", "xxhash", "safetensors", "typer", "rich"}


@pytest.mark.parametrize(("name", "target"), LINKS.items())
def test_the_folders_are_linked_into_the_package(name: str, target: str) -> None:
    """Relative links, and committed as links (mode 120000), so that every clone has them."""
    link = ROOT / "src" / "deltacast" / name
    assert link.is_symlink()
    assert str(link.readlink()) == target
    assert git("ls-files", "--stage", f"src/deltacast/{name}").startswith("120000 ")


@pytest.mark.parametrize("how", ["as installed here", "from the wheel"])
def test_no_bare_name_can_be_imported(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`delta`, `store` and `engines` belong to other distributions; ours exist below `deltacast` only."""
    path = request.getfixturevalue("installed") if how == "from the wheel" else None
    code = (
        "import importlib.util, deltacast.delta, deltacast.store, deltacast.engines\n"
        f"print(deltacast.__file__, [n for n in {BARE_NAMES} if importlib.util.find_spec(n)])"
    )
    done = run_python(code, cwd=tmp_path, path=path)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    assert path is None or done.stdout.startswith(str(path))


def test_a_bare_import_within_the_checkout_is_a_lint_error(project: dict[str, Any]) -> None:
    """There, `import delta` can work by accident, and then gives every class twice."""
    lint = project["tool"]["ruff"]["lint"]
    assert sorted(lint["flake8-tidy-imports"]["banned-api"]) == BARE_NAMES
    assert {"TID", "TID251"} & set(lint["select"])
    assert not any(code.startswith("TID") for code in lint["ignore"])


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="needs ruff, of the dev extra")
def test_ruff_finds_each_bare_import() -> None:
    """The configured ban works where the folders' own modules would break it."""
    code = "from delta.bits import words\nimport store\nimport engines.base\n"
    command = [sys.executable, "-P", "-m", "ruff", "check", "--output-format", "concise", "--select", "TID251"]
    done = subprocess.run(
        [*command, "--stdin-filename", "delta/invented.py", "-"],
        cwd=ROOT, input=code, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.count("TID251") == 3, done.stdout + done.stderr


def test_a_checkout_without_links_says_so(tmp_path: Path) -> None:
    """With `core.symlinks=false`, git writes the links as small text files; the import names cause and remedy."""
    shutil.copytree(ROOT / "src", tmp_path / "src", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, target in LINKS.items():
        file = tmp_path / "src" / "deltacast" / name
        file.unlink()
        file.write_text(target)
    done = run_python("import deltacast", cwd=tmp_path, path=tmp_path / "src")
    assert "ImportError: src/deltacast/delta is not a link" in done.stderr
    assert "core.symlinks=true" in done.stderr
