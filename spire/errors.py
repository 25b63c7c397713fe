"""The exceptions of Spire. They have one root, so that one table translates them at a boundary.

SpireError
├── CheckpointError    a model directory that cannot be served, naming the file
├── DataError          a command's data or files that cannot be used
├── MismatchError      two peers that do not match, naming both values
└── RequestError       a request that cannot be carried out
    ├── InvalidRequest     wrong by itself: shapes, ranges, unknown values
    ├── UnknownSequence    the verifier or draft holds no such sequence: replay it
    ├── NotAllowed         the name that a peer uses belongs to another peer
    ├── StaleBlock         a block for a past base, round or stream
    ├── NotFinite          non-finite logits for this sequence
    └── OutOfCapacity      no free slot or queue place: try again later
"""


class SpireError(Exception):
    """Root of all errors that Spire raises on purpose. The message is for people."""


class CheckpointError(SpireError):
    pass


class DataError(SpireError):
    pass


class MismatchError(SpireError):
    pass


class RequestError(SpireError):
    pass


class InvalidRequest(RequestError):
    """A request that is wrong by itself. `param` names the wrong field, or is empty if no single field is wrong."""

    def __init__(self, message: str, param: str = ""):
        super().__init__(message)
        self.param = param


class UnknownSequence(RequestError):
    pass


class NotAllowed(RequestError):
    pass


class StaleBlock(RequestError):
    pass


class NotFinite(RequestError):
    pass


class OutOfCapacity(RequestError):
    pass
