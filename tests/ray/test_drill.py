"""Eight cells of the drill on real processes, in two runs: survivors lose nothing, and the others come back."""

import pytest

from jobs.drill import DrillConfig
from jobs.drills.cells import HIT, standard
from jobs.drills.judge import rows
from jobs.drills.scene import play
from ray_lowcomm.core.settings import FleetSettings, RunSettings

WAITS_S = 6.0


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_a_drill_holds(mode, ray_cluster, tmp_path):
    fleet = FleetSettings(replicas=3, resources_per_replica={"CPU": 1.0}, deadline_s=WAITS_S, hang_s=30.0)
    run = RunSettings(name="drill", output_dir=str(tmp_path), eval_every=0)
    (drill,) = [drill for drill in standard(WAITS_S + 2.0) if drill.mode == mode]
    seen = play(DrillConfig(fleet=fleet, run=run), drill)
    table = rows(seen, fleet)
    assert [row.problems for row in table] == [()] * 4, "\n".join(seen.notices)
    assert {row.lost[1] for row in table} == {0}
    assert len({process.pid for process in seen.processes if process.replica != HIT}) == 2
    assert len({process.pid for process in seen.processes if process.replica == HIT}) == 2
    assert seen.summary["rounds_retried"] >= 1
    assert len(seen.summary["state_digests"]) == 3
