"""Do the files of deploy/ start the service with existing options, as an unprivileged user, and stop it only after it
has drained?
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from cryptography import x509

from weighbridge._cli.serving import serve_command
from weighbridge_service import server
from weighbridge_service.access import tokens
from weighbridge_service.access.policy import Policy

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = [DEPLOY / "kubernetes.yaml", DEPLOY / "kubernetes-s3.yaml"]
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
ENDING_SECONDS = server._LINGER_SECONDS + server._GRPC_GRACE_SECONDS + server._HTTP_GRACE_SECONDS
"""The longest time in seconds that the service takes to end beyond --drain-seconds."""
NAME = "app.kubernetes.io/name"


def asked_of(arguments: list[str]) -> dict[str, Any]:
    """The options that ``weighbridge serve`` would parse from these arguments.

    Raises click's error for unknown options.
    """
    assert arguments[0] == "serve"
    return serve_command.make_context("serve", list(arguments[1:])).params


def documents(path: Path) -> dict[tuple[str, str], Any]:
    """A manifest's objects, by kind and name."""
    found = list(yaml.safe_load_all(path.read_text("utf-8")))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(by_name) == len(found)
    return by_name


def pod_of(path: Path) -> Any:
    """The template of a manifest's pods."""
    (found,) = (each for (kind, _), each in documents(path).items() if kind in ("Deployment", "DaemonSet"))
    assert found["spec"]["selector"]["matchLabels"] == found["spec"]["template"]["metadata"]["labels"]
    return found["spec"]["template"]["spec"]


def container_of(path: Path) -> Any:
    """The service's container."""
    (container,) = pod_of(path)["containers"]
    return container


def lines_of_serving(path: Path) -> Iterator[list[str]]:
    """The words of each command line of a file that starts the service, variables as they are."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"weighbridge (serve [^'\n]*)", text):
        words = shlex.split(line, comments=True)
        if len(words) > 1:
            yield [word for word in words if word not in ("$OPTIONS", "${OPTIONS}")]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_starts_the_service_with_tls_and_a_policy(path: Path) -> None:
    container = container_of(path)
    asked = asked_of(container["args"])
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    for file in (asked["tls_cert"], asked["tls_key"], asked["policy"]):
        assert str(Path(file).parent) in mounted
    assert not asked["insecure"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert asked["grpc"] == f"0.0.0.0:{ports['grpc']}"
    assert int(asked["bulk_port"]) == ports["weights"]
    assert asked["http"] == f"0.0.0.0:{ports['http']}"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_runs_the_service_without_rights_on_a_file_system_that_it_cannot_write_to(
    path: Path,
) -> None:
    pod, container = pod_of(path), container_of(path)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text("utf-8")
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    account = documents(path)["ServiceAccount", pod["serviceAccountName"]]
    assert account["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    asked = asked_of(container["args"])
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert "/tmp" in writable
    store = asked["store"] if asked["scratch"] is None else asked["scratch"]
    assert str(store) in writable


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_kills_no_service_that_still_drains(path: Path) -> None:
    pod, container = pod_of(path), container_of(path)
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = float(seconds) + asked_of(container["args"])["drain_seconds"] + ENDING_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_probes_by_tls_what_restarts_and_what_routes(path: Path) -> None:
    container = container_of(path)
    probes = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/livez", "port": "http", "scheme": "HTTPS"},
        "livenessProbe": {"path": "/livez", "port": "http", "scheme": "HTTPS"},
        "readinessProbe": {"path": "/readyz", "port": "http", "scheme": "HTTPS"},
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_objects_select_the_services_and_their_ports(path: Path) -> None:
    found = documents(path)
    labels = {NAME: "weighbridge"}
    ports = {each["name"] for each in container_of(path)["ports"]}
    assert all(each["metadata"]["labels"] == labels for each in found.values())
    for (kind, _), each in found.items():
        if kind == "Service":
            assert each["spec"]["selector"] == labels
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
        if kind in ("NetworkPolicy", "PodDisruptionBudget"):
            field = "podSelector" if kind == "NetworkPolicy" else "selector"
            assert each["spec"][field] == {"matchLabels": labels}
    policy = found["NetworkPolicy", "weighbridge"]["spec"]
    opened: set[str] = set()
    for rule in policy["ingress"]:
        assert rule["from"], "no source is every source"
        opened.update(port["port"] for port in rule["ports"])
    assert policy["policyTypes"] == ["Ingress"]
    assert opened == ports


def test_kubernetes_names_of_replicas_are_those_of_a_headless_service_and_lead_to_pods_that_stop() -> None:
    path = DEPLOY / "kubernetes-s3.yaml"
    container = container_of(path)
    shell, option, script, *name = container["command"]
    assert (shell, option, name) == ("sh", "-c", ["weighbridge"])
    printing = script.replace("exec weighbridge", "printf '%s\\n'")
    environment = {"POD_IP": "10.0.0.7", "NAMESPACE": "rl", "PATH": "/usr/bin:/bin"}
    line = [shell, option, printing, *name, *container["args"]]
    said = subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    asked = asked_of(said)
    host, _, port = asked["advertise"].partition(":")
    assert host.split(".")[0] == "10-0-0-7"
    service = documents(path)["Service", host.split(".")[1]]["spec"]
    assert host.endswith(".rl.svc.cluster.local")
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    assert int(port) in {each["port"] for each in service["ports"]}
    assert {"POD_IP", "NAMESPACE"} <= {each["name"] for each in container["env"]}


def test_secrets_of_the_page_are_those_that_pods_mount_and_the_certificate_has_all_names(
    tmp_path: Path,
) -> None:
    page = (DEPLOY / "README.md").read_text("utf-8")
    (block,) = (each for each in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "kubectl" in each)
    made = {
        name: set(re.findall(r"--from-file=([\w.]+)", line))
        for name, line in re.findall(r"kubectl create secret generic (\S+)(.*)", block.replace("\\\n", ""))
    }
    for path in MANIFESTS:
        pod, container = pod_of(path), container_of(path)
        mounts = {each["name"]: Path(each["mountPath"]) for each in container["volumeMounts"]}
        asked = asked_of(container["args"])
        for volume in pod["volumes"]:
            if "secret" in volume:
                wanted = {asked[each] for each in ("tls_cert", "tls_key", "policy")}
                of_volume = {file.name for file in wanted if file.parent == mounts[volume["name"]]}
                assert of_volume
                assert of_volume <= made[volume["secret"]["secretName"]]
    (asked_for,) = re.findall(r"^deploy/certificates.sh .*?(?<!\\)\n", block, re.MULTILINE | re.DOTALL)
    subprocess.run(
        ["bash", "-euc", asked_for.replace("deploy/certificates.sh", str(DEPLOY / "certificates.sh"))],
        cwd=tmp_path, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls" / "weighbridge.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    has = set(names.get_values_for_type(x509.DNSName))
    services = {name: each["spec"] for (kind, name), each in documents(MANIFESTS[1]).items() if kind == "Service"}
    for name, spec in services.items():
        full = f"{name}.default.svc.cluster.local"
        if spec.get("clusterIP") == "None":
            assert f"*.{full}" in has
        else:
            assert {name, f"{name}.default.svc", full} <= has


def test_pods_of_the_page_are_admitted_and_show_tokens_that_its_policy_knows() -> None:
    page = (DEPLOY / "README.md").read_text("utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    text = text.replace("sha256:...", tokens.digest(tokens.new_token()))
    policy = Policy.parse(text)
    (issuer,) = policy.issuers.values()
    (pod,) = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    (container,) = pod["spec"]["containers"]
    (volume,) = pod["spec"]["volumes"]
    secret, token = (next(iter(each.items())) for each in volume["projected"]["sources"])
    assert token[1]["audience"] == issuer.audience
    assert f"serviceaccount:default:{pod['spec']['serviceAccountName']}" in text
    folder = container["volumeMounts"][0]["mountPath"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["WEIGHBRIDGE_CA"] == f"{folder}/{secret[1]['items'][0]['path']}"
    assert variables["WEIGHBRIDGE_TOKEN_FILE"] == f"{folder}/{token[1]['path']}"
    found = documents(DEPLOY / "kubernetes-s3.yaml")
    assert ("Service", variables["WEIGHBRIDGE_SERVER"].split(":")[0]) in found
    admitted = found["NetworkPolicy", "weighbridge"]["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert admitted["matchLabels"] == pod["metadata"]["labels"]


def unit() -> dict[str, str]:
    """Settings of the systemd unit's service."""
    text = (DEPLOY / "weighbridge.service").read_text("utf-8").replace("\\\n", " ")
    parser = RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return dict(parser["Service"])


def test_systemd_starts_the_service_with_tls_and_a_policy_and_kills_none_that_still_drains() -> None:
    (words,) = lines_of_serving(DEPLOY / "weighbridge.service")
    asked = asked_of(words)
    assert not asked["insecure"]
    assert asked["tls_cert"]
    assert asked["policy"]
    found = unit()
    assert found["KillMode"] == "mixed"
    assert float(found["TimeoutStopSec"]) >= asked["drain_seconds"] + ENDING_SECONDS
    assert found["Type"] == "exec", "the service does not notify"
    assert found["ProtectSystem"] == "strict"
    written = {
        found["RuntimeDirectory"]: Path(asked["local_socket"]),
        found["CacheDirectory"]: Path(asked["scratch"], "file"),
        found["LogsDirectory"]: Path(asked["audit"]),
    }
    for folder, file in written.items():
        assert file.parent.name == folder, "it may write there"


def test_slurm_starts_the_service_with_tls_and_a_policy_and_ends_it_within_the_job() -> None:
    path = DEPLOY / "slurm.sh"
    (words,) = lines_of_serving(path)
    asked = asked_of(words)
    assert not asked["insecure"]
    assert asked["tls_cert"]
    assert asked["policy"]
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", path.read_text("utf-8"), re.MULTILINE)
    assert float(seconds) >= 2 * (asked["drain_seconds"] + ENDING_SECONDS), "and the trainer ends before it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_setting_of_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "weighbridge.service"
    text = (DEPLOY / "weighbridge.service").read_text("utf-8")
    copy.write_text(text.replace("/opt/weighbridge/bin/weighbridge", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_that_can_be_run(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", path], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_scripts(path: Path) -> None:
    found = subprocess.run(["shellcheck", path], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


def test_compose_and_the_image_start_the_service_with_options_that_it_has() -> None:
    image = (DEPLOY / "Dockerfile").read_text("utf-8")
    (command,) = re.findall(r"^CMD (\[\"serve\".*\])$", image, re.MULTILINE)
    asked = asked_of(yaml.safe_load(command))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]["weighbridge"]
    assert float(compose["stop_grace_period"].removesuffix("s")) >= asked["drain_seconds"] + ENDING_SECONDS
    assert all(port.startswith("127.0.0.1:") for port in compose["ports"]), "it is asked without TLS"


def test_options_that_there_are_not_are_found() -> None:
    with pytest.raises(click.NoSuchOption):
        asked_of(["serve", "--no-such-option"])
