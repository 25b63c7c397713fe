"""A recorded trace is replayed as it was recorded; what is none is refused."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from spire.bench.load import read_trace
from spire.errors import DataError
from tests.services import Services
from tests.spire.bench.command import bench


def test_a_trace_arrives_as_recorded_and_its_lengths_fit_the_model(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.xz"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,1800,200", "2023-11-16 18:17:00,10,1"]
    with lzma.open(file, "wt") as out:
        out.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arrivals = read_trace(file, max_context=1000, seconds=30, rate=2)
    assert [round(one.at, 3) for one in arrivals] == [0, 2.157]
    assert [(one.context, one.generated) for one in arrivals] == [(187, 22), (900, 100)]
    assert len(read_trace(file, max_context=1000, seconds=80, rate=1)) == 3


@pytest.mark.thorough
def test_a_trace_is_replayed_at_every_depth(
    services: Services, stories_dir: Path, prose: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:4{at}.5,100,12" for at in range(3)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--json"]
    load = ["--trace", str(file), "--rate", "4", "--k", "2", "--repeats", "1"]
    plain, drafted = json.loads(bench(*common, *load))["bench"]
    for cell in (plain, drafted):
        assert cell["trace"] == "trace.csv"
        assert (cell["requests"], cell["generated"]) == (3, 36)
        # The last one arrives after half a second, so nothing can be quicker than that.
        assert cell["end_to_end_tokens_per_second"] < 36 / 0.5
        assert cell["inter_token_ms_p50"] > 0
    assert drafted["multiplier_end_to_end"] > 0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"a,b\n1,2\n", r"t\.csv, line 2: no TIMESTAMP. A trace is a CSV with the columns .*ContextTokens"),
        ("t.csv", b"%s2023-11-16 18:15:46,374\n", r"t\.csv, line 2: no GeneratedTokens"),
        ("t.csv", b"%s2023-11-16 18:15:46,many,44\n", r"t\.csv, line 2: .*'many'"),
        ("t.csv", b"%syesterday,1,44\n", r"t\.csv, line 2: .*'yesterday'"),
        ("t.csv", b"%s2023-11-16 18:15:46,-3,44\n", r"t\.csv, line 2: -3 tokens of context"),
        ("t.csv", b"%s2023-11-16\xe9", r"t\.csv, line 2: byte 11 is 0xe9"),
        ("t.csv", b"%s", r"t\.csv holds no request"),
        ("T.CSV.XZ", lzma.compress(b"2023-11-16" * 9)[:40], r"T\.CSV\.XZ is cut off"),
        ("absent.csv", None, r"absent\.csv cannot be read: No such file"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_and_line(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        heading = b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n"
        (tmp_path / name).write_bytes(content.replace(b"%s", heading))
    with pytest.raises(DataError, match=says):
        read_trace(tmp_path / name, 1000, 10, 1)
