"""The exceptions of Spire. They have one root, so that one table translates them at a boundary."""


class SpireError(Exception):
    """Root of all errors that Spire raises on purpose. The message is for people."""


class CheckpointError(SpireError):
    """A model directory that cannot be served. The message names the file."""


class DataError(SpireError):
    """A command's data or files that cannot be used."""


class MismatchError(SpireError):
    """Two peers that do not match. The message names both values."""


class RequestError(SpireError):
    """A request that cannot be carried out."""


class InvalidRequest(RequestError):
    """A request that is wrong by itself: shapes, ranges, unknown values.

    `param` names the wrong field, or is empty if no single field is wrong.
    """

    def __init__(self, message: str, param: str = ""):
        super().__init__(message)
        self.param = param


class UnknownSequence(RequestError):
    """The verifier or draft holds no such sequence: replay it."""


class NotAllowed(RequestError):
    """The name that a peer uses belongs to another peer."""


class StaleBlock(RequestError):
    """A block for a past base, round or stream."""


class NotFinite(RequestError):
    """Non-finite logits for this sequence."""


class OutOfCapacity(RequestError):
    """No free slot or queue place: try again later."""
