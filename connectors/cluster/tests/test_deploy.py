"""The application of deploy/kuberay.yaml is one, and its options are those of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import UsageError

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_the_application_of_kuberay_is_one_and_wrong_options_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ray.serve")
    from kvkeep_cluster import replicas

    monkeypatch.setenv("KVKEEP_API_KEYS", "some-key")
    claim, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    own = yaml.safe_load(service["spec"]["serveConfigV2"])
    (app,) = own["applications"]
    module, _, name = app["import_path"].partition(":")
    assert (module, name) == (replicas.__name__, "app")
    (given,) = replicas.app(app["args"])._bound_deployment.init_args
    assert given.cache == {"method": "kv-direct", "budget": "512"} and given.memory == 8 * 10**9 and given.keys
    assert given.limits.answers == 64 and app["args"]["sessions"].startswith("/data/")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {one["name"]: one["value"] for one in container["env"]}.items() >= replicas.ENVIRONMENT.items()
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for wrong, told in (
        ({"weigths": 1}, "Unknown option 'weigths': did you mean weights?"),
        ({"memory": None}, "needs 'memory'; give"),
        ({"sessions": None, "method": None, "budget": None}, "needs 'sessions' and 'method' or 'budget'; give"),
    ):
        args = {name: value for name, value in {**app["args"], **wrong}.items() if value is not None}
        with pytest.raises(UsageError, match=told):
            replicas.app(args)
