"""Options of the verifier. Precedence: command line, environment (`SPIRE_VERIFIER_*`), options file, defaults."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import CliSuppress, SettingsConfigDict

from spire.rpc.limits import MAX_NAMED
from spire.service.process import ModelServiceConfig


class VerifierConfig(ModelServiceConfig):
    """Options of the verifier: the target, the number of sequences, limits, the address to listen on."""

    model_config = SettingsConfigDict(
        env_prefix="SPIRE_VERIFIER_", cli_prog_name="verifier_service", pyproject_toml_table_header=("verifier",)
    )

    model: Path = Field(description="Target checkpoint directory in Hugging Face layout, with its tokenizer.json.")
    served_model_name: str = Field(
        "", pattern=r"^[^\x00-\x1f\x7f]*$", description="Name that requests ask for; by default the directory's."
    )
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    threads: int = Field(0, ge=0, description="Compute threads; 0 leaves it to torch, and so to OMP_NUM_THREADS.")
    max_sequences: int = Field(
        64, ge=1, le=MAX_NAMED, description="Sequences held at once; they share the cache's memory."
    )
    cache_gb: float = Field(
        0.0, ge=0, description="Memory for the cache; 0 takes what all sequences need, or 80 % of what is free."
    )
    prefix_cache: bool = Field(True, description="Keep finished sequences for prompts that begin alike.")
    max_context: int = Field(0, ge=0, description="Longest sequence, prompt and output; 0: the model's, if it fits.")
    max_depth: int = Field(16, ge=1, le=63, description="Longest block of draft tokens.")
    token_budget: int = Field(
        0,
        ge=0,
        description="Positions of one step: blocks to verify first, then prompts. 0: 64 to 512, as many as take half a "
        "second, or twice a step without prompts.",
    )
    self_window: int = Field(
        64, ge=1, description="MagicDec: last positions of its own cache that the target drafts through."
    )
    self_sink: int = Field(1, ge=0, description="MagicDec: first positions that it sees as well.")
    self_top_m: int = Field(
        0, ge=0, description="MagicDec: most probable tokens that a draft token is drawn from; 0: the whole vocabulary."
    )
    lossy_synthetic_acceptance: CliSuppress[float | None] = Field(
        None, ge=0, le=1, description="LOSSY, for benchmarks without trained weights: draft tokens stand so often."
    )
    lease_seconds: float = Field(30.0, ge=0, description="A gateway whose stream stays closed this long is forgotten.")
    stuck_seconds: float = Field(
        60.0,
        gt=0,
        description="A step that takes longer, and eight times as long as its like did, is stuck: health says "
        "NOT_SERVING.",
    )
    drain_seconds: float = Field(
        10.0, ge=0, description="After SIGTERM, how long running sequences may take to end; a second one ends at once."
    )
