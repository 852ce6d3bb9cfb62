"""What a replica is said to take of memory, against the tensors that are there."""

from dataclasses import replace

import pytest
import torch

from ray_lowcomm import strategies
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.settings import FleetSettings, InnerSettings, StrategySettings, TrackCodec
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.estimate import run_cost, sizes_of
from ray_lowcomm.footprint import footprint
from ray_lowcomm.process_size import CODE, process_bytes
from tests.unit.engine.local_run import Setup, mlp

CASES = {
    "ddp": {"name": "ddp"},
    "local_sgd": {"name": "local_sgd", "inner_steps": 4},
    "diloco": {"name": "diloco", "inner_steps": 4},
    "diloco_4_bits": {"name": "diloco", "inner_steps": 4, "value_bits": 4},
    "desloc": {"name": "desloc", "param_period": 4, "exp_avg_period": 4, "exp_avg_sq_period": 8},
    "desloc_coded": {"name": "desloc", "param_period": 4, "codec": {"default": TrackCodec(topk=64)}},
    "desloc_coded_late": {
        "name": "desloc",
        "param_period": 4,
        "overlap_steps": 2,
        "codec": {"default": TrackCodec(topk=64)},
    },
    "topk_diloco": {"name": "topk_diloco", "inner_steps": 4},
    "dct_buffer": {"name": "dct_momentum", "inner_steps": 4, "residual": "buffer"},
    "dct_paper": {"name": "dct_momentum", "inner_steps": 4, "variant": "paper"},
}


def needed(case, dtype, optimizer=torch.optim.AdamW, saves=False):
    model = mlp(norm=True, dtype=dtype)()
    tracks = Tracks(model, optimizer(model.parameters(), lr=1e-2))
    strategy = strategies.build(strategies.resolve(StrategySettings(**CASES[case])), tracks)
    config = TrainConfig(
        strategy=StrategySettings(**CASES[case]), inner=InnerSettings(steps=16), fleet=FleetSettings(replicas=3)
    )
    return footprint(
        model, tracks, strategy, run_cost(config, sizes_of(model, "average")).room, 3, saves
    ), tracks.layout


def memory_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_there_between_rounds(case, dtype, tmp_path):
    said, _ = needed(case, dtype)
    outcome = Setup(str(tmp_path), CASES[case], model=mlp(norm=True, dtype=dtype)).go()
    assert not outcome.failure
    model, optimizer = outcome.models[0], outcome.optimizers[0]
    state = outcome.replicas[0]._state
    own = [*model.parameters(), *model.buffers()]
    moments = [v for values in optimizer.state.values() for v in values.values() if v.dim() > 0]
    kept = (state.strategy.shared_state() | state.strategy.local_state() | state.tracks.masters()).items()
    kept = [v for name, v in kept if not name.startswith("digest/")]
    assert said.model == memory_of(own)
    assert said.moments == memory_of(moments)
    assert said.gradients == sum(p.numel() * p.element_size() for p in model.parameters())
    assert said.model + said.strategy == memory_of([*own, *kept])
    assert said.total == said.model + said.moments + said.gradients + said.strategy + said.round + said.process


def test_a_step_that_gathers_has_the_room_of_the_next_round_beside_it():
    said, layout = needed("topk_diloco", torch.float32)
    assert said.lent == layout.nbytes
    gathering = replace(said, gathered=2 * said.round)
    assert gathering.total == said.total - said.round + layout.nbytes + 2 * said.round
    assert replace(said, gathered=said.round - said.lent).total == said.total


def test_a_process_without_a_model_takes_what_is_resident_and_code():
    here = process_bytes()
    assert CODE < here - CODE < 1 << 33
    assert here - CODE == pytest.approx(process_bytes() - CODE, rel=0.2)


def test_a_round_takes_a_vector_for_each_track_that_is_averaged_and_one_for_all_that_are_coded():
    size = needed("ddp", torch.float32)[1].nbytes
    pieces = 2 * size  # a small model is exchanged at once
    assert needed("ddp", torch.float32)[0].round == size + pieces
    assert needed("diloco", torch.float32)[0].round == size + pieces
    assert needed("desloc", torch.float32)[0].round == 3 * size + pieces  # all are due at step 8
    for case in ("topk_diloco", "dct_buffer", "dct_paper"):
        assert size <= needed(case, torch.float32)[0].round < 7 * size  # a model this small is sent whole


def test_what_is_sent_late_is_taken_for_all_tracks_at_the_launch():
    size = needed("desloc_coded", torch.float32)[1].nbytes
    at_once, late = (needed(case, torch.float32)[0].round for case in ("desloc_coded", "desloc_coded_late"))
    assert late == at_once + size  # two tracks are due at step 12


@pytest.mark.parametrize("case", ["ddp", "diloco", "desloc", "dct_buffer"])
def test_a_checkpoint_beside_training_is_one_copy_of_what_is_saved(case, tmp_path):
    said, _ = needed(case, torch.float32, saves=True)
    outcome = Setup(str(tmp_path), CASES[case], model=mlp(norm=True)).go()
    state = outcome.replicas[0]._state
    saved = [v for n, v in (state.shared() | state.local()).items() if v.dtype != torch.uint8 and n[:7] != "random/"]
    copied = sum(v.numel() * v.element_size() for v in saved)  # without settings and generators, some kB
    assert said.checkpoint == pytest.approx(copied, rel=0.05)
    assert needed(case, torch.float32)[0].checkpoint == 0


def test_an_optimizer_without_moments_needs_none():
    assert needed("diloco", torch.float32, torch.optim.SGD)[0].moments == 0
