"""Records as the engine makes them."""


def record(number, *, step=None, loss=2.0, val_loss=None, members=(0, 1), retries=0):
    return {
        "round": number,
        "step": 16 * number if step is None else step,
        "generation": 1,
        "members": list(members),
        "loss": loss,
        "val_loss": val_loss,
        "bytes_up": 2048,
        "bytes_down": 4096,
        "compute_s": 1.0,
        "exchange_s": 0.1,
        "wait_s": 0.0,
        "retries": retries,
        "spread": 0.5,
    }


def summary(**more):
    return {"status": "finished", "run_name": "default", "strategy": "ddp", "replicas": 2, "rounds": 3, **more}
