"""The exception tree of Spire. One root, so that a boundary needs one table to translate it.

SpireError
├── CheckpointError    a model directory that cannot be served, naming the file
├── DataError          training or evaluation data that cannot be used
├── MismatchError      two peers that do not belong together, naming both values
└── RequestError       what one caller asked for cannot be done
    ├── InvalidRequest     wrong by itself: shapes, ranges, unknown values
    ├── UnknownSequence    the verifier or draft holds no such sequence: replay it
    ├── NotAllowed         the name that a peer goes by is another's
    ├── StaleBlock         a block for a base, round or stream that has passed
    ├── NotFinite          the model's numbers for this sequence went bad
    └── OutOfCapacity      no slot or queue place is free now: try again later
"""


class SpireError(Exception):
    """Root of every error that Spire raises on purpose. The message is for people."""


class CheckpointError(SpireError):
    pass


class DataError(SpireError):
    pass


class MismatchError(SpireError):
    pass


class RequestError(SpireError):
    pass


class InvalidRequest(RequestError):
    """`param` names the field that is wrong; empty where no single one is."""

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
