"""What can go wrong, as a user sees it: each error says what, which value, what is allowed and what to do."""


class LowCommError(Exception):
    """Base of all errors that this package raises on purpose; its text is meant for the user."""


class SettingError(LowCommError, ValueError):
    """A setting with a value that is not allowed.

    `field` is the dotted name (``strategy.topk``), `value` what was given, `allowed` what may stand there.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return (type(self), (self.field, self.value, self.allowed))


class PayloadError(LowCommError):
    """A message that is damaged, truncated or made for another model; nothing of it was used."""


class ModelError(LowCommError):
    """A model, loss or optimizer that cannot be trained here."""


class DataError(LowCommError):
    """Training or validation data that cannot be found, read or used."""


class CheckpointError(LowCommError):
    """A checkpoint that is missing, incomplete, damaged or made by another run."""


class ExchangeError(LowCommError):
    """An exchange that did not come through: a member died, hung or was cut off."""


class FleetError(LowCommError):
    """A run that cannot go on: the text names the replica and the reason."""
