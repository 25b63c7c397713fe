"""Options of the verifier service: command line, then environment (`SPIRE_VERIFIER_*`), then these defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from spire.process import ServiceConfig


class VerifierConfig(ServiceConfig):
    """Which target, how many sequences, where it listens."""

    model_config = SettingsConfigDict(
        env_prefix="SPIRE_VERIFIER_",
        frozen=True,
        cli_prog_name="verifier_service",
        cli_kebab_case=True,
        pyproject_toml_table_header=("verifier",),
    )

    model: Path = Field(description="Target checkpoint directory in Hugging Face layout, with its tokenizer.json.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: what the processor is fast in.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")
    threads: int = Field(0, ge=0, description="Compute threads; 0 leaves it to torch.")
    max_sequences: int = Field(64, ge=1, description="Sequences held at once: each has a preallocated slot.")
    max_context: int = Field(0, ge=0, description="Longest sequence, prompt and output; 0 takes the model's.")
    max_depth: int = Field(16, ge=1, le=63, description="Longest block of draft tokens.")
    prefill_budget: int = Field(512, ge=1, description="Prompt tokens processed between two decoding steps.")
    lease_seconds: float = Field(30.0, ge=0, description="A gateway whose stream stays closed this long is forgotten.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics; 0 serves none.")
    ready_file: Path | None = Field(None, description="Write HOST:PORT here once the service answers.")
