"""Files and batches as OpenAI's objects, and as they are kept on the disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
LONGEST_NAME = 255  # characters of a file's name
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def printable(name: str) -> str:
    """A name that can be written anywhere: each character that is none, as half of a pair, is replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


@dataclass
class FileRecord:
    """A file. owner: the name of the key that it came with; filename: as its owner calls it, never a path of ours."""

    id: str
    owner: str
    filename: str
    bytes: int
    created_at: int
    purpose: str

    def __post_init__(self) -> None:
        self.filename = printable(self.filename)[:LONGEST_NAME]

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {"object": "file"} | {k: v for k, v in asdict(self).items() if k != "owner"} | {"status": "processed"}


@dataclass
class BatchRecord:
    """A batch. Times are in seconds since 1970; `output` and `errors` are files from the beginning."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    output: str
    errors: str
    created_at: int
    expires_at: int
    completion_window: str
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)  # of the statuses that it has had
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to do."""
        return self.status in UNFINISHED

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's object. The files are told once they are finished."""
        over = not self.unfinished and self.status != "failed"
        found: dict[str, Any] = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.problems} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output if over and self.completed else None,
            "error_file_id": self.errors if over and self.failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        }
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"):
            found[f"{name}_at"] = self.times.get(name)
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return found | {"request_counts": counts, "metadata": self.metadata}
