"""Options of the draft service. Precedence: command line, environment (`SPIRE_DRAFT_*`), options file, defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from spire.address import Peer
from spire.service.process import ModelServiceConfig


class DraftServiceConfig(ModelServiceConfig):
    """Options of the draft service: the draft checkpoint, the verifier to follow, the address to listen on."""

    model_config = SettingsConfigDict(
        env_prefix="SPIRE_DRAFT_", cli_prog_name="draft_service", pyproject_toml_table_header=("draft",)
    )

    draft: Path = Field(description="Draft checkpoint directory.")
    target: Path | None = Field(
        None,
        description="Directory of the draft's target, whose embeddings a draft without its own uses. Default: they are "
        "asked from the verifier once and kept in the user's cache.",
    )
    verifier: Peer = Field(description="HOST:PORT of the verifier whose activations are followed.")
    draft_id: str = Field("", description="Name at the verifier; must outlive restarts. Default: from host and port.")
    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    threads: int = Field(0, ge=0, description="Compute threads; 0 is one for a small draft, torch's choice for others.")
    max_sequences: int = Field(256, ge=1, description="Sequences remembered at once; more are decoded plainly.")
    quantization: Literal["auto", "none", "fp8"] = Field(
        "auto",
        description="fp8 halves the bytes of the draft's weights, on a CPU or on a GPU of compute capability 9.0 or "
        "above; auto is fp8 on a CPU with kernels.",
    )
    top_m: int = Field(
        4096,
        ge=1,
        description="Tokens kept of a draft distribution; vocabularies up to this size, and those of drafts that have "
        "their own, are sent whole.",
    )
    wait_ms: float = Field(
        50.0, ge=0, description="How long a request waits for activations that are still on the way."
    )
