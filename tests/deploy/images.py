"""The images, built by buildah without an engine, a registry or a network of its own, and run in its chroot isolation.

The base is Debian with its Python, made by mmdebstrap: Dockerfiles take it in place of theirs. pip in a build is told
what pip is told on this machine. What it does not show: what an engine adds, such as the read-only root.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.compose import DEPLOY, ROOT

TOOLS = ("buildah", "mmdebstrap")
_BASE = "localhost/spire-base"


@dataclass(frozen=True)
class Images:
    """Where buildah keeps them; everything is below this directory."""

    directory: Path

    def buildah(self, *arguments: str | Path) -> list[str]:
        places = ["--root", self.directory / "storage", "--runroot", self.directory / "run"]
        return [str(part) for part in ("buildah", "--storage-driver", "vfs", *places, *arguments)]

    def do(self, *arguments: str | Path) -> str:
        """What buildah says. Raises AssertionError with its complaint."""
        done = subprocess.run(self.buildah(*arguments), capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(done.args)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def build_base(self) -> None:
        """Debian of the release that the Dockerfiles' own base has. `apt` is in it as it is in Debian's images."""
        release = re.search(r"PYTHON_IMAGE=python:\S+-slim-(\w+)", (DEPLOY / "gateway.Dockerfile").read_text())
        assert release
        archive = self.directory / "base" / "base.tar"
        archive.parent.mkdir()
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=apt", packages, release[1], archive], check=True)
        (archive.parent / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.do("bud", "--isolation", "chroot", "--tag", _BASE, archive.parent)
        archive.unlink()

    def build(self, name: str, **build_arguments: str) -> str:
        """Build deploy/NAME.Dockerfile, and return what it is called."""
        configuration, places = pip_configuration()
        file = self.directory / "pip.conf"
        file.write_text(configuration)
        given = {"PYTHON_IMAGE": _BASE} | build_arguments
        self.do(
            *("bud", "--isolation", "chroot", "--tag", f"localhost/spire-{name}", "--secret", f"id=pip,src={file}"),
            *(part for place in places for part in ("--volume", f"{place}:{place}:ro")),
            *(part for key, value in given.items() for part in ("--build-arg", f"{key}={value}")),
            *("--ignorefile", ROOT / ".dockerignore", "--file", DEPLOY / f"{name}.Dockerfile", ROOT),
        )
        return f"localhost/spire-{name}"

    @contextmanager
    def container(self, image: str) -> Iterator[Container]:
        name = self.do("from", image)
        try:
            yield Container(self, name, Path(self.do("mount", name)))
        finally:
            self.do("rm", name)


@dataclass(frozen=True)
class Container:
    images: Images
    name: str
    root: Path

    def command(self, arguments: Sequence[str], options: Iterable[str] = ()) -> list[str]:
        return self.images.buildah("run", "--isolation", "chroot", *options, self.name, "--", *arguments)

    def run(self, *arguments: str, options: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(arguments, options), capture_output=True, text=True, timeout=120)

    def written_since(self, marker: Path) -> set[str]:
        """Files of the root that are newer than the marker: what a read-only root would have refused."""
        newer = ["find", str(self.root), "-xdev", "-newer", str(marker), "-type", "f", "-printf", "/%P\n"]
        return set(subprocess.run(newer, capture_output=True, text=True, check=True).stdout.splitlines())


def pip_configuration() -> tuple[str, list[Path]]:
    """A pip.conf of what pip is told here by files and environment, and the directories of this machine it names."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    values: dict[str, str] = {}
    for line in told.stdout.splitlines():
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = " ".join(ast.literal_eval(value).split())
    words = [word.removeprefix("file://") for value in values.values() for word in value.split()]
    # Two steps from the root: an index lies beside the files that it leads to.
    places = {Path(*Path(word).parts[:3]) for word in words if word.startswith("/")}
    lines = ["[global]", *(f"{key} = {value}" for key, value in values.items())]
    return "\n".join(lines) + "\n", sorted(place for place in places if place.is_dir())


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask everything of the process's group to end, as an engine asks the service in its container."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
