"""Names under which replicas offer each other tensors: the same on who offers and who tells what is still wanted."""


def state_offer(number: int) -> str:
    """Name of the offer of a state at the end of round `number`."""
    return f"state {number}"


def own_offer(name: str) -> str:
    """Name of the offer of what only one member has, beside that of a state."""
    return f"{name}, own"


def round_offer(number: int) -> str:
    """Name of the offer of what was received in round `number`."""
    return f"round {number}"
