"""Numbers of a run: round records, totals, and the bytes of one exchange worked out by hand."""

import pytest
import torch

from ray_lowcomm.core.payload import Payload
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.totals import Totals, round_record
from ray_lowcomm.engine.transport import bytes_moved

from .desk import CONFIG, ROUNDS, SIZE, Desk, H

RECORD_KEYS = {
    *("round", "step", "generation", "members", "steps", "loss", "val_loss", "bytes_up", "bytes_down"),
    *("compute_s", "exchange_s", "wait_s", "outer_s", "blocked_s", "retries", "skipped_steps", "spread"),
}


def arrival(member=0, steps=4, tokens=8, loss=1.0, **more):
    return m.Arrival(member, 1, 0, True, steps, tokens, loss, 2.0, (), None, {}, **more)


def vote(member=0, **more):
    return m.Vote(member, 1, 1, True, **more)


# ---- records ----------------------------------------------------------------------------------------------------


def test_a_record_has_the_agreed_fields_and_means():
    arrivals = [arrival(0, tokens=10, loss=1.0, residual_norm=3.0), arrival(2, tokens=30, loss=2.0, residual_norm=4.0)]
    votes = [vote(0, exchange_s=1.0, outer_s=0.5), vote(2, exchange_s=3.0, wait_s=5.0, outer_s=1.0)]
    moved = [{"up": 10, "down": 50}, {"up": 20, "down": 40}]
    record = round_record((3, 12, 7), arrivals, votes, moved, 2)
    assert set(record) == RECORD_KEYS
    assert (record["round"], record["step"], record["generation"], record["members"]) == (3, 12, 7, [0, 2])
    assert record["loss"] == pytest.approx(1.75)
    assert (record["bytes_up"], record["bytes_down"], record["retries"]) == (20, 50, 2)
    assert (record["compute_s"], record["exchange_s"], record["wait_s"]) == (2.0, 2.0, 2.5)
    assert record["outer_s"] == 0.75
    assert record["spread"] == pytest.approx(12.5**0.5)
    assert record["val_loss"] is None


def test_who_has_no_finite_loss_does_not_count_for_it():
    arrivals = [arrival(0, tokens=10, loss=1.0), arrival(1, tokens=10, loss=None), arrival(2, tokens=30, loss=2.0)]
    assert round_record((3, 12, 7), arrivals, [], [], 0)["loss"] == pytest.approx(1.75)
    assert round_record((3, 12, 7), [arrival(tokens=3, loss=None)], [], [], 0)["loss"] is None


def test_without_tokens_steps_weigh_the_loss():
    record = round_record((1, 4, 1), [arrival(steps=1, tokens=0), arrival(steps=3, tokens=0, loss=5.0)], [], [], 0)
    assert record["loss"] == pytest.approx(4.0)
    assert (record["bytes_up"], record["wait_s"]) == (0, 0.0)


def test_goodput_is_the_share_of_the_steps_that_all_could_have_taken():
    desk = Desk(2, total=5 * H)
    desk.begin()
    assert desk.summary["goodput"] is None
    desk.now += 2.0  # of which a replica computes all: half a second a step
    desk.run_round()
    assert desk.summary["goodput"] == 1.0
    desk.now += 4.0
    desk.run_round()
    assert desk.summary["goodput"] == pytest.approx(16 / 24, abs=1e-4)
    desk.lose(1)
    desk.now += 2.0
    desk.run_round(0)
    assert desk.summary["goodput"] == pytest.approx(20 / 32, abs=1e-4)
    desk.arrive(0, compute_s=4.0)
    desk.now += 4.0  # this one is slower now, of the other the last pace is known
    desk.take(0)
    desk.vote(0)
    assert desk.summary["goodput"] == pytest.approx(24 / (32 + 4.0 / 1.0 + 4.0 / 0.5), abs=1e-4)


def test_replicas_that_share_a_process_take_turns_and_have_no_goodput():
    desk = Desk(2, transport="local")
    desk.begin()
    desk.now += 2.0
    desk.run_round()
    assert desk.summary["goodput"] is None


def test_bytes_of_a_round_include_failed_attempts():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    moved = {"up": 5, "down": 7, "buffer": 1, "wire_up": 11, "wire_down": 13}
    desk.vote(0, 1, ok=False, bytes=moved)
    desk.vote(0, bytes=moved)
    desk.vote(1, bytes=moved | {"up": 6})
    record = desk.said("record")[-1]
    assert (record["bytes_up"], record["bytes_down"]) == (11, 14)
    assert (desk.summary["wire_bytes_up"], desk.summary["buffer_bytes"]) == (22, 2)
    desk.drop_answers()
    desk.arrive(0, 1)
    desk.vote(0, 1, bytes=moved)
    assert desk.said("record")[-1]["bytes_up"] == 5


# ---- totals -----------------------------------------------------------------------------------------------------


def test_bytes_of_a_run_are_the_sum_of_its_rounds_each_of_the_replica_with_most():
    desk = Desk(2)
    desk.begin()
    for up in ((10, 4), (1, 200)):  # another replica has most in the second round
        desk.arrive(0, 1)
        for index in (0, 1):
            desk.vote(index, bytes={"up": up[index], "down": 7 * up[index]})
        desk.drop_answers()
    rounds = desk.said("record")
    assert [record["bytes_up"] for record in rounds] == [10, 200]
    assert desk.summary["bytes_up"] == 210
    assert desk.summary["bytes_down"] == sum(record["bytes_down"] for record in rounds) == 1470


def test_what_an_exchange_has_moved_that_was_never_committed_counts_for_the_run():
    desk = Desk(2, max_retries=0)
    desk.begin()
    desk.arrive(0, 1)
    desk.vote(0, 1, ok=False, bytes={"up": 5})
    assert desk.failure
    assert desk.summary["bytes_up"] == desk.summary["bytes_up"] == 5  # asking does not count again


def test_compression_is_dense_bytes_by_bytes():
    summary = Totals(dense_bytes=600, bytes_up=20, bytes_down=200).summary()
    assert (summary["compression_up"], summary["compression_down"]) == (30.0, 3.0)


def test_the_loss_of_a_round_has_the_weights_of_the_parameters_mean():
    desk = Desk(3)
    desk.begin()
    for index, tokens, loss in ((0, 30, 1.0), (1, 10, 2.0), (2, 0, 100.0)):
        desk.arrive(index, tokens=tokens, loss=loss)
    assert desk.plans[0].weights == (0.75, 0.25, 0.0)
    desk.vote(0, 1, 2)
    assert desk.said("record")[-1]["loss"] == 1.25


def test_where_nobody_counts_tokens_steps_weigh():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, tokens=0, steps=3, loss=1.0)
    desk.arrive(1, tokens=0, steps=1, loss=2.0)
    assert desk.plans[0].weights == (0.75, 0.25)
    desk.vote(0, 1)
    assert desk.said("record")[-1]["loss"] == 1.25


def test_with_one_replica_nothing_is_sent_and_compression_is_null():
    desk = Desk(1)
    desk.begin()
    for _ in range(ROUNDS):
        desk.run_round()
    summary = desk.summary
    assert (summary["dense_bytes"], summary["bytes_up"], summary["bytes_down"]) == (0, 0, 0)
    assert (summary["compression_up"], summary["compression_down"]) == (None, None)


def test_utilisation_is_the_share_of_computing():
    # what was exchanged beside inner steps took longer than anybody waited for it
    totals = Totals(compute_s=8.0, exchange_s=5.5, wait_s=0.5, outer_s=0.5, blocked_s=1.5)
    assert totals.summary()["utilisation"] == 0.8
    assert Totals().summary()["utilisation"] is None


def test_what_a_lost_replica_held_back_is_counted():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 2, residual_norm=1.0)
    desk.arrive(1, residual_norm=3.0)
    desk.take(0, 1, 2)
    desk.vote(0, 1, 2)
    desk.take(0, 1, 2)
    assert desk.summary["lost_residual_norm"] == 0.0
    desk.lose(1)
    desk.lose(2)
    assert desk.summary["lost_residual_norm"] == pytest.approx(10**0.5)


def test_time_in_attempts_that_have_failed_counts():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0, exchange_s=4.0, wait_s=1.0)
    desk.vote(1, ok=False, exchange_s=2.0)
    desk.take(0, 1)
    desk.vote(0, 1, exchange_s=1.0)
    desk.take(0, 1)
    assert (desk.summary["exchange_s"], desk.summary["wait_s"]) == (4.0, 0.5)


def test_totals_survive_json():
    totals = Totals(tokens=3, val_loss=1.5)
    totals.count_bytes(2, {"up": 4})
    import json

    assert Totals.from_json(json.loads(json.dumps(totals.to_json()))) == totals


def test_the_summary_counts_what_was_done():
    desk = Desk(2)
    desk.begin()
    desk.run_round(loss=4.0)
    desk.now = 9.0
    desk.run_round(loss=2.0)
    summary = desk.summary
    assert (summary["rounds"], summary["replicas"]) == (2, 2)
    assert (summary["inner_steps"], summary["tokens"]) == (4 * H, 40)
    assert (summary["train_loss"], summary["val_loss"]) == (2.0, None)
    assert summary["dense_bytes"] == 2 * SIZE
    assert summary["compute_s"] == 4.0
    assert summary["wall_s"] == 9.0


@pytest.mark.parametrize(
    ("tracks", "counted"),
    [(("params",), 1), (("grads",), 1), (("exp_avg", "exp_avg_sq"), 0), (("exp_avg", "params"), 1), ((), 0)],
)
def test_dense_bytes_count_only_parameters_gradients_and_pseudo_gradients(tracks, counted):
    desk = Desk(1)
    desk.join(0)
    assert desk.coordinator.fleet.agreement.dense_bytes([SyncOp(track, 4, 4) for track in tracks]) == counted * SIZE


def test_a_fragment_counts_for_its_part_of_a_dense_message():
    desk = Desk(2, total=H + 1, strategy={"fragments": 2})
    desk.join(0, 1, config=CONFIG | {"model.dense_bytes": "16,24"})
    desk.take(0, 1)
    counted = []
    for _ in range(3):
        desk.run_round()
        counted.append(desk.summary["dense_bytes"])
    assert [r["step"] for r in desk.said("record")] == [2, 4, 5]
    assert counted == [16, 16 + 24, 16 + 24 + 40]  # at the end both


def test_where_nothing_is_sent_a_dense_message_is_none_either():
    desk = Desk(1)
    desk.begin()
    desk.run_round()
    assert desk.summary["dense_bytes"] == 0


# ---- bytes of an exchange ---------------------------------------------------------------------------------------


def moved(combine, sizes, member, data):
    members = tuple(range(len(sizes)))
    plan = m.Plan(1, 0, members, (1 / len(sizes),) * len(sizes), {"op": tuple(sizes)}, 60.0)
    return bytes_moved(plan, [("op", Payload(combine, data))], member)


def numbers(up, down, wire_up, wire_down, buffer=0):
    return {"up": up, "down": down, "buffer": buffer, "wire_up": wire_up, "wire_down": wire_down}


@pytest.mark.parametrize("combine", ["mean", "gather", "first"])
def test_alone_nothing_moves(combine):
    assert moved(combine, [400], 0, torch.zeros(100)) == numbers(0, 0, 0, 0)


def test_mean_of_100_floats_over_4():
    # shards of 25 floats: 3 shards out to be summed, 3 shards of the result out again; as many in
    assert moved("mean", [400] * 4, 1, torch.zeros(100)) == numbers(400, 400, 600, 600)


def test_mean_that_does_not_divide_has_shards_of_unequal_size():
    # 10 floats over 3: shards of 3, 3 and 4 floats; the others' out and its own sum to two, and as much in
    assert moved("mean", [40] * 3, 0, torch.zeros(10)) == numbers(40, 40, 28 + 24, 28 + 24)
    assert moved("mean", [40] * 3, 2, torch.zeros(10)) == numbers(40, 40, 24 + 32, 24 + 32)


def test_mean_of_doubles():
    assert moved("mean", [80] * 2, 0, torch.zeros(10, dtype=torch.float64)) == numbers(80, 80, 80, 80)


def test_gather_sends_each_message_as_long_as_it_is():
    data = torch.zeros(90, dtype=torch.uint8)
    assert moved("gather", [100, 90, 80], 1, data) == numbers(90, 180, 180, 180)
    assert moved("gather", [100, 90, 80], 2, data) == numbers(80, 190, 160, 190)


def test_first_goes_from_the_lowest_rank_to_all():
    data = torch.zeros(16, dtype=torch.uint8)
    assert moved("first", [16] * 3, 0, data) == numbers(16, 0, 32, 0)
    assert moved("first", [16] * 3, 2, data) == numbers(0, 16, 0, 16)


def test_ranks_are_not_member_numbers():
    plan = m.Plan(1, 0, (3, 5), (0.5, 0.5), {"op": (16, 16)}, 60.0)
    payload = Payload("first", torch.zeros(16, dtype=torch.uint8))
    assert bytes_moved(plan, [("op", payload)], 3)["up"] == 16


def test_buffers_are_counted_and_shown_apart():
    ops = {"params@4": (400, 400), "buffers@4": (40, 40), "buffers_copied@4": (8, 8)}
    plan = m.Plan(1, 0, (0, 1), (0.5, 0.5), ops, 60.0)
    payloads = [
        ("params@4", Payload("mean", torch.zeros(100))),
        ("buffers@4", Payload("mean", torch.zeros(10))),
        ("buffers_copied@4", Payload("first", torch.zeros(8, dtype=torch.uint8))),
    ]
    assert bytes_moved(plan, payloads, 0) == numbers(448, 440, 448, 440, buffer=48)
    assert bytes_moved(plan, payloads, 1) == numbers(440, 448, 440, 448, buffer=48)


def test_a_transferred_state_is_traffic_of_donor_and_joiner():
    desk = Desk(2)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0)
    desk.offer(0)
    assert desk.summary["state_transfer_bytes"] == 0  # nobody knows yet how much of it is fetched
    desk.back(1)
    assert desk.summary["state_transfer_bytes"] == 100
    assert desk.coordinator.book.totals.bytes[0]["wire_up"] == 100
    assert desk.coordinator.book.totals.bytes[1]["wire_down"] == 100
    assert desk.summary["bytes_up"] == 0
