"""guidellm, unmodified, benchmarks a live system: streams, usage, `ignore_eos`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import run_tool


def test_guidellm_finishes_every_request_with_the_tokens_it_asked_for(
    url: str, stories_chat_dir: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    command = [
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={url},request_format=/v1/completions"),
        *("--profile", "kind=synchronous"),
        *("--constraint", "kind=max_requests,count=3"),
        *("--tokenizer", f"kind=hf_auto,model={stories_chat_dir}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    ]
    run_tool(command, tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (3, 0)
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {12}
